"""Notes beside a run's checkpoints: of the model's architecture, and of the data.

Megatron's own error for a checkpoint of another model is about shards and shapes; the note's names
the setting that differs. And a checkpoint's place in the data is a number of samples: under other
data, another seed or another template it would silently name another sample.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loongplug.models.registry import present_name
from loongplug.output_files import write_whole

ARCHITECTURE_FILE = "loongplug_architecture.json"
DATA_FILE = "loongplug_data.json"
# Where a converted checkpoint keeps what stood beside the weights, to be converted back by itself.
CARRIED_FOLDER = "hugging_face"
_OF_ITS_PLACE = (
    "data_parallel_size",
    "pipeline_model_parallel_size",
    "rank_offset",
    "stage_layers",
    "tensor_model_parallel_size",
)
_NOT_THE_WEIGHTS = (
    *_OF_ITS_PLACE,
    "dropout",
    "freeze",
    "initializer_range",
    "joined_rows",
    "layer_scale",  # at the start
    "lr_mult",
    "max_position_embeddings",
    "mode",  # how an encoder is parallel
    "recompute",
)
_SHOWN = 5
_UNCHECKED = " to go on with the data unchecked."
_LETTERS = 200  # of a value


def check_architecture(load_dir: Path, model_yaml: Mapping[str, Any]) -> None:
    """Refuse the checkpoints in ``load_dir`` when they are of another architecture.

    A folder without a note (checkpoints from elsewhere) passes here; its tensors are compared
    when it is loaded (:mod:`loongplug.checkpoint.resume_checks`). No collectives.
    """
    path = load_dir / ARCHITECTURE_FILE
    noted = _read_note(path, keys=model_yaml.keys(), without=": the tensors are compared, too.")
    if noted is not None:
        found, expected = (
            {
                key: present_name(str(value)) if key.endswith("_target_") else value
                for key, value in _flat(_plain(settings), ".")
                if key.rpartition(".")[2] not in _NOT_THE_WEIGHTS
                and value is not None  # as if it were not there: older notes lack newer settings
            }
            for settings in (noted, model_yaml)
        )
        refuse_differences(found, expected, folder=load_dir)


def read_architecture(folder: Path) -> dict[str, Any] | None:
    """The model that is noted in ``folder``, as plain data; None where there is no note."""
    return _read_note(folder / ARCHITECTURE_FILE, keys=("model",), without=" and export again.")


def for_any_layout(noted: Any) -> Any:
    """A noted model without the parallel sizes and the places of its modules."""
    if isinstance(noted, dict):
        return {
            key: for_any_layout(item) for key, item in noted.items() if key not in _OF_ITS_PLACE
        }
    if isinstance(noted, list):
        return [for_any_layout(item) for item in noted]
    if isinstance(noted, str) and "${" in noted:
        raise ValueError(
            f"{ARCHITECTURE_FILE} has {noted!r:.200}, which stands for something else: expected"
            " plain values, as LoongPlug writes them."
        )
    return noted


def refuse_differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, folder: Path
) -> None:
    """Refuse the checkpoint in ``folder`` when what it has differs from what the model has."""
    if differences := _differences(found, expected, "{} is {} in the checkpoint, {} here"):
        raise ValueError(
            f"The checkpoint in {folder} is of another model: {differences}. Use the "
            "config it was trained with, or another checkpoint folder."
        )


def check_data_note(load_dir: Path, fingerprint: Mapping[str, Any]) -> None:
    """Refuse to go on with the checkpoints in ``load_dir`` when the data have changed.

    What has no note (checkpoints from elsewhere, parts of newer versions) passes. No collectives.
    """
    path = load_dir / DATA_FILE
    noted = _read_note(path, keys=fingerprint.keys(), without=_UNCHECKED)
    known = {part: value for part, value in fingerprint.items() if part in (noted or {})}
    found, expected = (dict(_flat(_plain(each or {}), " ")) for each in (noted, known))
    # A setting that a note has no word of was as it is now where nothing is given.
    absent = [name for name in expected.keys() - found.keys() if name.startswith("settings ")]
    for name in absent:
        if expected[name] in (None, False, [], "split"):
            del expected[name]
    if noted and (differences := _differences(found, expected, "{} was {}, is {}")):
        raise ValueError(
            f"The data are not those of the checkpoint in {load_dir}: {differences}. Its"
            " place in them would be another one. Give the data and settings it was trained with;"
            f" or start again from its weights with --finetune and another --save; or remove {path}"
            " to go on at the same number of samples in the new data."
        )


def drops_transparency(load_dir: Path) -> bool:
    """Whether a run there dropped transparency, as all once did: its note has no word of it."""
    noted = _read_note(load_dir / DATA_FILE, keys=("settings",), without=_UNCHECKED)
    return noted is not None and "settings transparency" not in dict(_flat(noted, " "))


def write_note(path: Path, content: Mapping[Any, Any]) -> None:
    """Write a note in one piece, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=2) + "\n")


def _read_note(path: Path, *, keys: Collection[str], without: str) -> dict[str, Any] | None:
    """The note at ``path``, which has some of the ``keys``; None where there is none.

    ``without`` says what follows when the file is removed.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"{path} is not a file; remove it{without}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it{without}"
        ) from error
    if not isinstance(found, dict) or not found.keys() & set(keys):
        raise ValueError(
            f"{path} is not a note of LoongPlug: it has none of {', '.join(keys)}; "
            f"remove it{without}"
        )
    return found


def _plain(content: Mapping[str, Any]) -> Any:
    """The content as it would come back from the file: tuples are lists then."""
    return json.loads(json.dumps(content))


def _flat(value: Any, separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Joined keys and their values; a list is one value, unless it holds mappings."""
    items: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, Sequence) and any(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    if items is None:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(item, separator, f"{prefix}{separator}{key}" if prefix else str(key))


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any], sentence: str) -> str:
    """The first differences, in the order of what is expected; empty where there are none.

    ``sentence`` has places for a name, the value found and the one expected.
    """

    def shown(values: Mapping[str, Any], key: str) -> str:
        text = str(values.get(key, "absent"))
        return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}..."

    keys = [
        key
        for key in dict.fromkeys([*expected, *found])
        if key not in found or key not in expected or found[key] != expected[key]
    ]
    told = [sentence.format(key, shown(found, key), shown(expected, key)) for key in keys[:_SHOWN]]
    rest = len(keys) - _SHOWN
    return "; ".join([*told, f"and {rest} more"] if rest > 0 else told)
