"""Megatron's tracker file, which names the latest checkpoint of a folder."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"


def check_latest(folder: Path, *, step: int | None = None) -> None:
    """Refuse a folder whose latest checkpoint (or that of iteration ``step``) is not there.

    Megatron ends such a run without an error. For all ranks; no collectives.

    Raises:
        ValueError: the tracker is damaged, or names a checkpoint that is missing or incomplete.
    """
    text = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if not (text.isdecimal() or text == "release"):
        raise ValueError(
            f"{folder / TRACKER} says {text!r} where an iteration or 'release' is expected; write "
            f"the iteration of the checkpoint to load into it: {_complete(folder)}."
        )
    name = f"iter_{step:07d}" if step else text if text == "release" else f"iter_{int(text):07d}"
    if not is_complete(folder / name):
        raise ValueError(
            f"{folder} has no complete checkpoint {name}, which "
            f"{'--ckpt-step' if step else TRACKER} asks for; complete are: {_complete(folder)}."
        )


def is_complete(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` is a ``torch_dist`` checkpoint: its metadata is written last."""
    return all((checkpoint / name).is_file() for name in (".metadata", "metadata.json"))


def _complete(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.glob("*") if is_complete(p))) or "none"


def replaced_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """``open`` that replaces the tracker as a whole once it is written."""

    @wraps(original)
    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "w" or Path(file).name != TRACKER:
            return original(file, mode, *args, **kwargs)
        return _replacing(Path(file))

    return open_


@contextmanager
def _replacing(path: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    part = path.with_name(f".{path.name}.part")
    part.write_text(text.getvalue(), encoding="utf-8")
    flush(part)
    os.replace(part, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have the disk hold what was written, so that a power cut finds it in the same order."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems flush no folders
            raise
    finally:
        os.close(descriptor)
