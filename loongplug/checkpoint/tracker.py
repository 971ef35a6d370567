"""Megatron's tracker file, which names the latest checkpoint of a folder."""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from loongplug.checkpoint.whole import check_whole, is_complete, whole_checkpoints, with_others

TRACKER = "latest_checkpointed_iteration.txt"


def check_latest(folder: Path, *, step: int | None = None) -> Path:
    """The latest checkpoint of ``folder`` (or that of iteration ``step``), which has to be whole.

    Megatron ends a run without an error where it is not there. Looks at no more of the files than
    their sizes; no collectives.

    Raises:
        ValueError: the tracker is damaged, or names a checkpoint that is missing or damaged; with
            those that are whole.
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
    part = path.with_name(f".{path.name}.part")
    part.write_text(text.getvalue(), encoding="utf-8")
    flush(part)
    os.replace(part, path)
    flush(path.parent)
    then()


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
