"""Where the rows stand in a file that is one JSON array, as LLaVA publishes its data.

Only the structure is read here: brackets and strings. Rows are parsed when they are used, one by
one, so that a bad one is one bad row, and a large one is refused before it is parsed.
"""

import re
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

_CHUNK = 16 * 2**20
_HEAD = 4096
_MARK = "\xef\xbb\xbf"  # UTF-8's byte order mark, read as latin-1
_BLANKS = re.compile(r"[ \t\n\r]*")
# What changes no depth: anything but brackets, and whole strings.
_PLAIN = re.compile(r'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
# The rest of a string, up to its end or to a backslash that the window cuts off.
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


def is_array(path: Path) -> bool:
    """Whether the file begins with a bracket and an object; a line ``[1]`` is one bad row."""
    with path.open("rb") as file:
        text = _Window(file, chunk=_HEAD)
        if text.next_character() != "[":
            return False
        text.skip(1)
        return text.next_character() in ("{", "]")


def scan_array(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte offset and line number, from 1, of each element, [rows] each; reads the file once.

    Raises:
        ValueError: the file is not a JSON array of objects; with the line.
    """
    offsets, lines = array("q"), array("q")
    with path.open("rb") as file:
        text = _Window(file, chunk=_CHUNK)
        text.next_character()
        text.skip(1)  # the bracket
        character = text.next_character()
        while character != "]":
            if character != "{":
                raise _no_array(path, text.line, "expected an object or the end ]")
            offsets.append(text.offset)
            lines.append(text.line)
            if not text.skip_object():
                raise _no_array(path, lines[-1], "an object that does not end")
            character = text.next_character()
            if character == ",":
                text.skip(1)
                character = text.next_character()
            elif character != "]":
                raise _no_array(path, text.line, "expected a comma or the end ]")
        text.skip(1)
        if text.next_character():
            raise _no_array(path, text.line, "something behind the array's end")
    return np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64)


def _no_array(path: Path, line: int, what: str) -> ValueError:
    return ValueError(
        f"{path}:{line}: {what}. The file begins with [ and {{, so it has to be one JSON array of"
        " rows: mend it, or write one row to a line."
    )


class _Window:
    """A part of the file, with the place that has been read up to; what is behind it is let go.

    Its bytes are characters of latin-1, so that places in the text are places in the file; JSON's
    own characters are the same in UTF-8.
    """

    def __init__(self, file: BinaryIO, *, chunk: int) -> None:
        self._file = file
        self._chunk = chunk
        self._text = ""
        self._at = 0
        self._begins = 0  # the text, in the file
        self.line = 1
        while len(self._text) < len(_MARK) and self._more():
            pass
        if self._text.startswith(_MARK):
            self._at = len(_MARK)

    @property
    def offset(self) -> int:
        """Of the next character, in the file."""
        return self._begins + self._at

    def next_character(self) -> str:
        """The next one that is no blank, which stays; "" at the end."""
        while True:
            self._skip_to(_BLANKS)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, count: int) -> None:
        """Go on behind the next ``count`` characters."""
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def skip_object(self) -> bool:
        """Go on behind the object that begins here; False where the file ends before it does."""
        depth, in_string = 0, False
        while True:
            self._skip_to(_IN_STRING if in_string else _PLAIN)
            character = self._text[self._at : self._at + 1]
            if character in ("", "\\"):  # the window ends, maybe between a backslash and the next
                if not self._more():
                    return False
            elif character == '"':
                self.skip(1)
                in_string = not in_string
            else:
                self.skip(1)
                depth += 1 if character in "{[" else -1
                if depth == 0:
                    return True

    def _skip_to(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        assert found is not None, "it may be empty"
        self.skip(found.end() - self._at)

    def _more(self) -> bool:
        piece = self._file.read(self._chunk)
        self._begins += self._at
        self._text, self._at = self._text[self._at :] + piece.decode("latin-1"), 0
        return bool(piece)
