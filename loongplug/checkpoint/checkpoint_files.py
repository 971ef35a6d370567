"""The files of checkpoints: the tracker, which names the latest, and whether all are whole.

Sizes tell of files that are missing, empty or cut off before anything is loaded. What is damaged
within a file shows when it is read. Both are told alike: the file, what is wrong with it, and which
other checkpoints of the folder are whole.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from loongplug.output_files import write_whole
from loongplug.platform.safe_reading import DamagedFileError

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG, DESCRIPTION = "metadata.json", ".metadata"
_BACKEND = "torch_dist"
_NO_PLACE = "it does not say what lies where in its folder"
_SHOWN = 5


def check_latest(folder: Path, *, step: int | None = None) -> Path:
    """The latest checkpoint of ``folder`` (or that of iteration ``step``), which has to be whole.

    Megatron ends a run without an error where it is not there. Looks at no more of the files than
    their sizes; no collectives.
    """
    tracker = folder / TRACKER
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not (re.fullmatch("[0-9]{1,18}", text) or text == "release"):
        raise ValueError(
            f"{tracker} says {text[:40]!r} where an iteration or 'release' is expected; write "
            f"the iteration of the checkpoint to load into it: {whole_checkpoints(folder)}."
        )
    if step and text == "release":
        raise ValueError(
            f"{tracker} says 'release', which goes before --ckpt-step {step}; write {step} into it"
        )
    number = step or text
    checkpoint = folder / (text if text == "release" else f"iter_{int(number):07d}")
    if not is_complete(checkpoint):
        raise with_others(
            ValueError(
                f"{folder} has no complete checkpoint {checkpoint.name}, which "
                f"{'--ckpt-step' if step else TRACKER} asks for."
            ),
            checkpoint,
        )
    check_whole(checkpoint)
    return checkpoint


def replaced_whole(
    original: Callable[..., Any], *, then: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """``open`` that replaces the tracker as a whole once it is written; ``then`` follows."""

    @wraps(original)
    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "w" or Path(file).name != TRACKER:
            return original(file, mode, *args, **kwargs)
        return _replacing(Path(file), then)

    return open_


@contextmanager
def _replacing(path: Path, then: Callable[[], None]) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    write_whole(path, text.getvalue())
    then()


def check_whole(checkpoint: Path) -> None:
    """Refuse a ``torch_dist`` checkpoint that lacks files, or some of their bytes.

    Reads ``metadata.json`` and ``.metadata``; of the other files, sizes alone. No collectives.
    """
    with told_of_damage(checkpoint):
        _check(checkpoint)


def is_complete(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` was written to its end: these two files are written last."""
    return all((checkpoint / name).is_file() for name in (DESCRIPTION, CONFIG))


def whole_checkpoints(folder: Path, *, besides: Path | None = None) -> str:
    """The names of the latest whole checkpoints of ``folder``, five at most, or ``none``."""
    found: list[str] = []
    names = [path.name for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
    for name in [*sorted(names, reverse=True), "release"]:
        path = folder / name
        if path != besides and _is_whole(path):
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
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except DamagedFileError as error:
        raise with_others(error, checkpoint) from error
    except CheckpointException as caught:  # torch's, by rank; it is not an Exception
        reason = first_reason(caught)
        if not isinstance(reason, DamagedFileError):
            raise
        raise with_others(reason, checkpoint) from caught


def first_reason(caught: Any) -> BaseException:
    """The error on the first rank that torch's CheckpointException tells of, else itself."""
    failures = getattr(caught, "failures", {})  # by rank, each with its trace
    return next((failure for failure, _ in failures.values()), caught)


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
    described_files(checkpoint)


def described_files(checkpoint: Path) -> Any:
    """torch's own description of a ``torch_dist`` checkpoint, each of whose bytes is there."""
    metadata = description(checkpoint)
    needed: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        try:
            name, end = Path(stored.relative_path).name, stored.offset + stored.length
        except (AttributeError, TypeError):  # a stranger's, maybe
            name, end = "", 0
        if not name or name != stored.relative_path:
            raise DamagedFileError.unreadable(checkpoint / DESCRIPTION, _NO_PLACE)
        needed[name] = max(end, needed.get(name, 0))
    for name, size in needed.items():
        path = checkpoint / name
        if not path.is_file():
            raise DamagedFileError(f"The checkpoint {checkpoint} lacks {name}: copy it there.")
        if path.stat().st_size < size:
            raise DamagedFileError(
                f"{path} ends after {path.stat().st_size} of {size} bytes: copy it again."
            )
    return metadata


def description(checkpoint: Path) -> Any:
    """torch's own description of a ``torch_dist`` checkpoint; reads ``.metadata`` alone."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    path = checkpoint / DESCRIPTION
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedFileError.unreadable(path, error) from error
    if not (isinstance(metadata, Metadata) and isinstance(metadata.storage_data, dict)):
        raise DamagedFileError.unreadable(path, "it describes no checkpoint")
    return metadata
