"""Whether a checkpoint is complete, and the message for one that is not.

Sizes tell of files that are missing, empty or cut off before anything is loaded. What is damaged
within a file shows when it is read. Both are told alike: the file, what is wrong with it, and which
other checkpoints of the folder are whole.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loongplug.platform.safe_reading import DamagedFileError

CONFIG, DESCRIPTION = "metadata.json", ".metadata"
_BACKEND = "torch_dist"
_NO_PLACE = "it does not say what lies where in its folder"
_RECORD = ("relative_path", "offset", "length")  # file, begin and length
_SHOWN = 5


def check_whole(checkpoint: Path) -> None:
    """Refuse a ``torch_dist`` checkpoint that lacks files, or some of their bytes.

    Reads ``metadata.json`` and ``.metadata``; of the other files, sizes alone. No collectives.

    Raises:
        ValueError: with the file, what is wrong, and other checkpoints of the folder.
    """
    with told_of_damage(checkpoint):
        _check(checkpoint)


def described_files(checkpoint: Path) -> Any:
    """torch's own description of a ``torch_dist`` checkpoint, each of whose bytes is there.

    No collectives.

    Raises:
        ValueError: as :func:`check_whole`.
    """
    with told_of_damage(checkpoint):
        return _described(checkpoint)


def description(checkpoint: Path) -> Any:
    """torch's own description of a ``torch_dist`` checkpoint; reads ``.metadata`` alone.

    No collectives.

    Raises:
        ValueError: as :func:`check_whole`.
    """
    with told_of_damage(checkpoint):
        return _metadata(checkpoint)


def is_complete(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` was written to its end: these two files are written last."""
    return all((checkpoint / name).is_file() for name in (DESCRIPTION, CONFIG))


def whole_checkpoints(folder: Path, *, besides: Path | None = None) -> str:
    """The names of the latest whole checkpoints of ``folder``, five at most, or ``none``."""
    found: list[str] = []
    names = [path.name for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
    for name in [*sorted(names, reverse=True), "release"]:
        path = folder / name
        if path != besides and is_complete(path) and _is_whole(path):
            found.append(name)
        if len(found) > _SHOWN:
            found[-1] = "..."
            break
    return ", ".join(found) or "none"


def with_others(error: Exception, checkpoint: Path) -> ValueError:
    """What is wrong with a checkpoint, and how to go on from another one."""
    others = whole_checkpoints(checkpoint.parent, besides=checkpoint)
    if others == "none":
        return ValueError(f"{error} No other checkpoint in {checkpoint.parent} is whole.")
    return ValueError(
        f"{error} Whole in {checkpoint.parent}, by the sizes of files, are: {others}; give "
        "--ckpt-step N to load that of iteration N."
    )


@contextmanager
def told_of_damage(checkpoint: Path) -> Iterator[None]:
    """Around a read of ``checkpoint`` by torch or Megatron: damage becomes the same sentence.

    No collectives: the ranks that read what is damaged raise, and tell the others by ending.

    Raises:
        ValueError: a file cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except DamagedFileError as error:
        raise with_others(error, checkpoint) from error
    except CheckpointException as caught:  # torch's, by rank; it is not an Exception
        reason = next((failure for failure, _ in caught.failures.values()), None)
        if not isinstance(reason, DamagedFileError):
            raise
        raise with_others(reason, checkpoint) from caught


def _is_whole(checkpoint: Path) -> bool:
    try:
        _check(checkpoint)
    except DamagedFileError:
        return False
    return True


def _check(checkpoint: Path) -> None:
    path = checkpoint / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError.unreadable(path, error) from error
    if not isinstance(config, dict) or config.get("sharded_backend") != _BACKEND:
        raise DamagedFileError.unreadable(path, f"it does not say sharded_backend {_BACKEND!r}")
    _described(checkpoint)


def _described(checkpoint: Path) -> Any:
    metadata = _metadata(checkpoint)
    needed: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        record: list[Any] = [getattr(stored, each, None) for each in _RECORD]  # a stranger's, maybe
        name, start, length = record
        numbers = type(start) is int and type(length) is int and start >= 0 and length >= 0
        if not (numbers and isinstance(name, str)):
            raise DamagedFileError.unreadable(checkpoint / DESCRIPTION, _NO_PLACE)
        needed[name] = max(start + length, needed.get(name, 0))
    for name, size in needed.items():
        if name in ("", "..") or Path(name).name != name:
            raise DamagedFileError.unreadable(checkpoint / DESCRIPTION, _NO_PLACE)
        path = checkpoint / name
        if not path.is_file():
            raise DamagedFileError(f"The checkpoint {checkpoint} lacks {name}: copy it there.")
        if path.stat().st_size < size:
            raise DamagedFileError(
                f"{path} ends after {path.stat().st_size} of {size} bytes: copy it again."
            )
    return metadata


def _metadata(checkpoint: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    path = checkpoint / DESCRIPTION
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedFileError.unreadable(path, error) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise DamagedFileError.unreadable(path, "it describes no checkpoint")
    if not isinstance(metadata.storage_data, dict):
        raise DamagedFileError.unreadable(path, _NO_PLACE)
    return metadata
