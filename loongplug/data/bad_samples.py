"""Samples that cannot be used: what is wrong with them, and what becomes of them in training."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from loongplug.data.kept_files import ChangedFileError
from loongplug.data.object_store import StoreError
from loongplug.data.remarks import Remarks

# row: no JSON, or no known schema. media: a file is missing, or its header says that it cannot be
# used. text: the chat template, its image tokens. length: longer than a sequence. pixels: the
# header is right, but what follows is damaged. masked: the row's own loss or weight leaves it out,
# which is no fault and ends no run.
BadKind = Literal["row", "media", "text", "length", "pixels", "masked"]
BAD_KINDS: tuple[BadKind, ...] = get_args(BadKind)

# What is odd about videos that are used all the same: of any such video, and of the one.
OddVideos = list[tuple[str, str]]

BadSamplePolicy = Literal["skip", "fatal"]
BAD_SAMPLE_POLICIES: tuple[BadSamplePolicy, ...] = get_args(BadSamplePolicy)

_MOST = 500  # characters of a message about one row
_MOST_ALIKE = 5  # that are printed
_OWN_WORDS = re.compile(r"""'[^']*'|"[^"]*"|\S*[\d./]\S*""")  # of a row, not of its fault
_LONG_WORD = re.compile(r"(?<=\s)(\S{40})\S{20,}(\S{30})")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadSample:
    """Why a sample cannot be used; ``message`` says where it stands (``path:line``)."""

    kind: BadKind
    message: str

    def __post_init__(self) -> None:
        """Bound the message, which may quote the row: its long words, then its middle go."""
        if len(self.message) > _MOST:
            short = _LONG_WORD.sub(r"\1...\2", self.message)
            if len(short) > _MOST:
                short = f"{short[: _MOST - 205]} ... {short[-200:]}"
            object.__setattr__(self, "message", short)


class BadSampleError(ValueError):
    """A sample cannot be used; the message is that of ``sample``."""

    def __init__(self, sample: BadSample) -> None:
        super().__init__(sample.message)
        self.sample = sample


@contextmanager
def bad_as(kind: BadKind) -> Iterator[None]:
    """Makes a ValueError within a BadSampleError of this kind, but for one of no sample's fault."""
    try:
        yield
    except (StoreError, ChangedFileError):
        raise
    except ValueError as error:
        raise BadSampleError(BadSample(kind, str(error))) from error


@contextmanager
def told(before: str, behind: str = "") -> Iterator[None]:
    """Has a ValueError within say where or of what it is, and perhaps what helps."""
    try:
        yield
    except (StoreError, ChangedFileError):
        raise
    except ValueError as error:
        raise ValueError(f"{before}{error}{behind}") from error


class PrintedFaults:
    """Bad samples on standard output: the first of each fault, and how many there are more.

    Two have one fault if they differ in numbers, names of files and what is quoted alone.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}  # where the first is, and how many there are

    def add(self, bad: BadSample) -> None:
        """Print it, if few are like it so far."""
        fault = _OWN_WORDS.sub("", bad.message)
        # Names of files may be bytes that are no text, which could not be printed.
        line = bad.message.encode(errors="backslashreplace").decode()
        first, count = self._found.get(fault, (line.split(": ")[0], 0))
        self._found[fault] = first, count + 1
        if count < _MOST_ALIKE:
            print(line, flush=True)

    def end(self) -> None:
        """Print how many were not."""
        for first, count in self._found.values():
            if count > _MOST_ALIKE:
                print(f"{count - _MOST_ALIKE} more are like {first}", flush=True)


class BadSamples:
    """What training does with the bad samples it meets, and how many it met.

    All ranks of a replica meet bad text, and log it where ``speaks`` is set; the one that loads bad
    pixels meets and logs them.
    """

    def __init__(self, policy: BadSamplePolicy = "fatal", remarks: Remarks | None = None) -> None:
        self.skips = policy == "skip"
        self.speaks = True
        self.counts: Counter[str] = Counter()
        self.media: Counter[str] = Counter()  # by encoder, those that this rank has loaded
        self.remarks = remarks or Remarks()  # on samples that are used

    def meet(self, sample: BadSample) -> None:
        """Count and log a sample that is to be left out; BadSampleError where none may be."""
        masked = sample.kind == "masked"
        if not self.skips and not masked:
            raise BadSampleError(sample)
        self.counts[sample.kind] += 1
        if (self.speaks and not masked) or sample.kind == "pixels":
            _LOG.warning("bad sample left out (%s): %s", sample.kind, sample.message)

    def used(self, odd: OddVideos) -> None:
        """Count odd videos that this rank has decoded; logs the first of each kind."""
        for kind, message in odd:
            if ("video", kind) not in self.remarks.found:
                _LOG.warning(message)
            self.remarks.add([("video", kind)], where=message)
