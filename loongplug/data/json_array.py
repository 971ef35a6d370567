"""Where the rows stand in a file that is one JSON array, as LLaVA publishes its data."""

import json
import re
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

_CHUNK = 16 * 2**20
_MOST = 2**30  # bytes of one row
_BLANKS = re.compile(r"[ \t\n\r]*")


def is_array(path: Path) -> bool:
    """Whether the first character that is no blank opens an array."""
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            if found := piece.lstrip(b" \t\n\r"):
                return found.startswith(b"[")
    return False


def scan_array(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte offset and line number, from 1, of each element, [rows] each; reads the file once.

    Raises:
        ValueError: the file is no JSON array of objects; with the line.
    """
    offsets: list[int] = []
    lines: list[int] = []
    with path.open("rb") as file:
        text = _Window(file)
        text.next_character()
        text.skip(1)  # the bracket
        character = text.next_character()
        while character != "]":
            if character != "{":
                raise _no_array(path, text.line, "expected an object, a comma or the end ]")
            offsets.append(text.offset)
            lines.append(text.line)
            try:
                text.skip_object()
            except (ValueError, RecursionError) as error:
                raise _no_array(
                    path, lines[-1], f"an object that cannot be read ({error})"
                ) from error
            character = text.next_character()
            if character == ",":
                text.skip(1)
                character = text.next_character()
        text.skip(1)
        if text.next_character():
            raise _no_array(path, text.line, "something behind the array's end")
    return np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64)


def _no_array(path: Path, line: int, what: str) -> ValueError:
    return ValueError(
        f"{path}:{line}: {what}. The file begins with [, so it has to be one JSON array of rows:"
        " mend it, or write one row to a line."
    )


class _Window:
    """A part of the file, with the place that has been read up to.

    Its bytes are characters of latin-1, so that places in the text are places in the file; JSON's
    own characters are the same in UTF-8.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._begins = 0  # the text, in the file
        self._decoder = json.JSONDecoder()
        self.line = 1

    @property
    def offset(self) -> int:
        """Of the next character, in the file."""
        return self._begins + self._at

    def next_character(self) -> str:
        """The next one that is no blank, which stays; "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            assert blanks is not None, "it may be empty"
            self.skip(blanks.end() - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, count: int) -> None:
        """Go on behind the next ``count`` characters."""
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def skip_object(self) -> None:
        """Go on behind the object that begins here; ValueError where it is none."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:  # it may only be cut off by the window
                if len(self._text) - self._at > _MOST or not self._more():
                    raise
            else:
                self.skip(end - self._at)
                return

    def _more(self) -> bool:
        rest = self._text[self._at :]
        piece = self._file.read(max(_CHUNK, len(rest)))  # doubling: a long object is read few times
        self._begins += self._at
        self._text, self._at = rest + piece.decode("latin-1"), 0
        return bool(piece)
