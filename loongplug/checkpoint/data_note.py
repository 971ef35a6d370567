"""A note of the data beside a run's checkpoints, and the check against it.

A checkpoint's place in the data is a number of samples. Under other data, another seed or
another template it would silently name another sample.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loongplug.checkpoint.notes import read_note, write_note
from loongplug.checkpoint.tracker import TRACKER

DATA_FILE = "loongplug_data.json"
_SHOWN = 5
_LETTERS = 200  # of a value


def write_data_note(save_dir: Path, fingerprint: Mapping[str, Any], *, rank: int) -> None:
    """Note the data of the checkpoints that will be saved in ``save_dir``.

    ``fingerprint`` is plain data (:func:`loongplug.data.fingerprint.fingerprint`). For all ranks:
    rank 0 writes, every rank checks. No collectives.

    Raises:
        ValueError: the folder already has checkpoints of a run on other data.
    """
    if (save_dir / TRACKER).is_file():
        check_data_note(save_dir, fingerprint)
    if rank != 0:
        return
    write_note(save_dir / DATA_FILE, fingerprint)


def check_data_note(load_dir: Path, fingerprint: Mapping[str, Any]) -> None:
    """Refuse to go on with the checkpoints in ``load_dir`` when the data have changed.

    A folder without a note (checkpoints from elsewhere) passes. No collectives.

    Raises:
        ValueError: with what differs, or for a note that is damaged or another file.
    """
    path = load_dir / DATA_FILE
    noted = read_note(path, keys=fingerprint.keys(), without=" to go on with the data unchecked.")
    if noted is None:
        return
    found = dict(_flat(noted))
    expected = dict(_flat(json.loads(json.dumps(fingerprint))))  # as it would come back
    keys = [*expected, *(key for key in found if key not in expected)]
    differences = [
        f"{key} was {_shown(found, key)}, is {_shown(expected, key)}"
        for key in keys
        if key not in found or key not in expected or found[key] != expected[key]
    ]
    if differences:
        rest = len(differences) - _SHOWN
        shown = differences[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise ValueError(
            f"The data are not those of the checkpoint in {load_dir}: {'; '.join(shown)}. Its"
            " place in them would be another one. Give the data and settings it was trained with;"
            f" or start anew from its weights with --finetune and another --save; or remove {path}"
            " to go on at the same number of samples in the new data."
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    text = str(values.get(key, "absent"))
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}..."


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names of the parts and their values."""
    for key, item in value.items():
        name = f"{prefix} {key}" if prefix else str(key)
        if isinstance(item, dict):
            yield from _flat(item, name)
        else:
            yield name, item
