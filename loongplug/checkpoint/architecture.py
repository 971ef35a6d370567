"""A note of the model's architecture beside its checkpoints, and the check against it.

Megatron's own error for a checkpoint of another model is about shards and shapes; this one names
the setting that differs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loongplug.checkpoint.notes import read_note, write_note
from loongplug.checkpoint.tracker import TRACKER

ARCHITECTURE_FILE = "loongplug_architecture.json"
_NOT_THE_WEIGHTS = (
    "dropout",
    "freeze",
    "initializer_range",
    "lr_mult",
    "max_position_embeddings",
    "recompute",
    "tensor_model_parallel_size",
)
_SHOWN = 5


def write_architecture(save_dir: Path, model_yaml: Mapping[str, Any], *, rank: int) -> None:
    """Note the architecture of the checkpoints that will be saved in ``save_dir``.

    ``model_yaml`` is the resolved model as plain data. A folder that has checkpoints keeps its
    note. For all ranks: rank 0 writes, every rank checks. No collectives.

    Raises:
        ValueError: the folder already has checkpoints of another architecture.
    """
    if (save_dir / TRACKER).is_file():
        # Checkpoints without a note are not ours to describe: nothing here has compared them.
        check_architecture(save_dir, model_yaml)
        return
    if rank != 0:
        return
    write_note(save_dir / ARCHITECTURE_FILE, _plain(model_yaml))


def check_architecture(load_dir: Path, model_yaml: Mapping[str, Any]) -> None:
    """Refuse the checkpoints in ``load_dir`` when they are of another architecture.

    A folder without a note (checkpoints from elsewhere) passes here; its tensors are compared
    when it is loaded (:mod:`loongplug.checkpoint.same_tensors`). No collectives.

    Raises:
        ValueError: with the settings that differ, or for a note that is damaged or another file.
    """
    path = load_dir / ARCHITECTURE_FILE
    noted = read_note(path, keys=model_yaml.keys(), without=": the tensors are compared, too.")
    if noted is None:
        return
    refuse_differences(
        _that_matter(dict(_flat(noted))),
        _that_matter(dict(_flat(_plain(model_yaml)))),
        folder=load_dir,
    )


def refuse_differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, folder: Path
) -> None:
    """Refuse the checkpoint in ``folder`` when what it has differs from what the model has.

    Raises:
        ValueError: with the first differences, in the model's order.
    """
    differences = [
        f"{key} is {found.get(key, 'absent')} in the checkpoint, {expected.get(key, 'absent')} here"
        for key in [*expected, *(key for key in found if key not in expected)]
        if key not in found or key not in expected or found[key] != expected[key]
    ]
    if differences:
        rest = len(differences) - _SHOWN
        shown = differences[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise ValueError(
            f"The checkpoint in {folder} is of another model: {'; '.join(shown)}. Use the "
            "config it was trained with, or another checkpoint folder."
        )


def _that_matter(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in settings.items()
        if key.rpartition(".")[2] not in _NOT_THE_WEIGHTS
        and value is not None  # as if it were not there: older notes lack newer settings
    }


def _plain(model_yaml: Mapping[str, Any]) -> Any:
    """As it would come back from the file: tuples are lists then."""
    return json.loads(json.dumps(model_yaml))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a list is one value, unless it holds mappings."""
    items: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, Sequence) and any(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    if items is None:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
