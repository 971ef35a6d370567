"""Files that commands leave where their user says: nothing but LoongPlug's own is ever replaced.

Figures of all versions are known by their keys, pictures by a text chunk, which older ones lack.
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Fits = Callable[[Any], bool]  # whether an object has our keys
Kind = str | Fits  # of figures: a command's name, or what tells them
Ours = Callable[[Path], bool]  # whether LoongPlug made a regular file; ValueError: it did not

MADE_BY = {"Software": "LoongPlug"}  # a text chunk of every picture
_LARGEST = 2**26  # bytes of figures
_BEGIN = 1024  # bytes, with the text chunks


def keys(always: str, sometimes: str = "") -> Fits:
    """Whether an object has the keys that are written ``always``, and else ``sometimes`` alone."""
    least, most = set(always.split()), set(f"{always} {sometimes}".split())
    return lambda found: isinstance(found, dict) and least <= found.keys() <= most


def json_lines(fits: Fits) -> Ours:
    """A file with JSON in every line."""

    def ours(path: Path) -> bool:
        with path.open("rb") as file:
            return all(fits(json.loads(line)) for line in file)

    return ours


def begins(pattern: bytes) -> Ours:
    """A file whose first bytes match a pattern."""

    def ours(path: Path) -> bool:
        with path.open("rb") as file:
            return re.match(pattern, file.read(_BEGIN), re.DOTALL) is not None

    return ours


_OF_RUNS = (
    "loss_first loss_last tokens_per_second train_seconds iterations",
    "fill_rate valid_loss valid_exact_match bad_samples empty_steps",
)
_is_run = keys(*_OF_RUNS)


def _are_metrics(found: Any) -> bool:
    """Metrics of a run, of runs by name, of an evaluation with scores by any name, or of all."""
    if not isinstance(found, dict) or not found:
        return False
    rest = {name for name, value in found.items() if not _is_run(value)}
    if "eval_seconds" in rest:
        scores = {name for name in rest if isinstance(found[name], float) and 0 <= found[name] <= 1}
        rest -= {"eval_samples", "eval_seconds", "scores_per_task"}
        rest -= scores.difference(" ".join(_OF_RUNS).split())
    return not rest or _is_run(dict.fromkeys(rest))


_FIGURES: Mapping[str, Fits] = {
    "metrics": _are_metrics,
    "estimate": lambda found: keys("stages")(found) or keys("layouts")(found),
    "partition": keys("microbatches kept flags encoder_stages splits", "alone"),
    "verify": keys(
        "model ranks device agrees notes limits modules loss gradient_norm microbatches steps "
        "copies_apart faults tensors losses"
    ),
    "bench step": keys("ranks warmup step_seconds step_tokens losses peak_memory_bytes"),
}
PREDICTIONS = json_lines(keys("row task question answer prediction score"))
PICTURE = begins(rb"\x89PNG.*tEXtSoftware\0LoongPlug")


def figures(kind: Kind) -> Ours:
    """A JSON file with what a command writes."""
    fits = _FIGURES[kind] if isinstance(kind, str) else kind
    return lambda path: path.stat().st_size <= _LARGEST and fits(json.loads(path.read_bytes()))


def check_output(path: Path | None, ours: Ours, *, inputs: Iterable[str] = ()) -> None:
    """Refuse a file that is there and is not LoongPlug's own of its kind; for a start.

    ``inputs`` are what a run reads, or the words of its command line. Raises ValueError. An empty
    file is nobody's. What is no regular file will be written to, and is not read here.
    """
    if path is None:
        return
    try:
        if path.is_dir() or path.is_block_device() or path.is_socket():
            raise ValueError(f"{path} is a folder, a disk or a socket: give a file.")
        for each in (part for word in inputs for part in (word, word.partition("=")[2]) if part):
            if os.path.realpath(path) == os.path.realpath(each) or (
                path.exists() and os.path.exists(each) and path.samefile(each)
            ):
                raise ValueError(f"{path} is {each}, which the run needs: give another file.")
        if not path.exists() or is_stream(path) or path.stat().st_size == 0:
            return
        try:
            mine = ours(path)
        except (ValueError, RecursionError):  # no JSON
            mine = False
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error}): give another place.") from error
    if not mine:
        raise ValueError(
            f"{path} is there and would be lost: it is not what LoongPlug writes to it. Give "
            "another place, or move it away."
        )


def check_pictures(folder: Path | None, names: Iterable[str]) -> None:
    """As :func:`check_output`, of pictures in a folder, which matplotlib draws."""
    if folder is None:
        return
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        cure = "pip install 'loongplug[plots]'"
        raise ValueError(f"matplotlib, which draws pictures, is missing: {cure}.") from error
    for name in names:
        check_output(folder / name, PICTURE)


def is_stream(path: Path) -> bool:
    """Whether what is there is written to: a device, a pipe, or where this process prints to."""
    try:
        found = path.stat()
        printed = any(os.path.samestat(found, os.fstat(each)) for each in (1, 2))
    except OSError:  # nothing is there
        return False
    return printed or not stat.S_ISREG(found.st_mode)


def write_figures(path: Path | None, content: Any, kind: Kind, *, beside: bool = False) -> None:
    """Write ``content`` as JSON where a file was asked for; ``beside`` what it has, if told so."""
    if path is None:
        return
    if beside and path.exists() and not is_stream(path):
        check_output(path, figures(kind))
        content = json.loads(path.read_bytes() or "{}") | content
    fits = _FIGURES[kind] if isinstance(kind, str) else kind
    assert fits(content), content  # or the next run would refuse it
    write_output(path, json.dumps(content, indent=2) + "\n", figures(kind))


def write_output(path: Path, text: str, ours: Ours) -> None:
    """Write a file in one piece; another one that came there meanwhile is a ValueError."""
    check_output(path, ours)
    if is_stream(path):
        # A pipe that nobody reads is an error, and no wait without an end.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        os.set_blocking(handle, True)
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
    else:
        with put_whole(Path(os.path.realpath(path))) as whole:  # a link stays
            whole.write_text(text, encoding="utf-8")


@contextmanager
def put_whole(place: Path) -> Iterator[Path]:
    """A new file to write, which takes its place at once when it is done, and only then."""
    place.parent.mkdir(parents=True, exist_ok=True)
    whole = place.with_name(f".{place.name[:200]}.{secrets.token_hex(4)}")
    try:
        yield whole
        whole.replace(place)
    finally:
        whole.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one piece, which the disk has then; a run that is killed leaves one part."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    part.replace(path)
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
