"""Where the rows stand in a file that is one JSON array, as LLaVA publishes its data.

Only the structure is read here: brackets and strings. Rows are parsed when they are used, one by
one, so that a bad one is one bad row, and a large one is refused before it is parsed.
"""

import re
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path

_HEAD = 2**16  # bytes; more blanks than that are in front of no array
_BLANKS = re.compile(rb"[ \t\n\r]*+")
# Up to the first row or the end, behind UTF-8's byte order mark.
_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\n\r]*+\[[ \t\n\r]*+(?=[{\]])")
# What changes no depth: anything but brackets, and whole strings.
_PLAIN = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_NEWLINE = re.compile(rb"\n")


def is_array(path: Path) -> bool:
    """Whether the file begins with a bracket and an object; a line ``[1]`` is one bad row."""
    with path.open("rb") as file:
        return _BEGINNING.match(file.read(_HEAD)) is not None


def scan_array(path: Path) -> Iterator[tuple[int, int]]:
    """Byte offset and line number, from 1, of each element; ValueError for no array of objects."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        counted, line = 0, 1

        def expected(what: str, *characters: bytes) -> bytes:
            """The character here, of these."""
            nonlocal counted, line
            line += sum(1 for _ in _NEWLINE.finditer(text, counted, at))
            counted = at
            if text[at : at + 1] not in characters:
                raise _no_array(path, line, what)
            return text[at : at + 1]

        beginning = _BEGINNING.match(text)
        assert beginning is not None, "is_array has looked"
        at = beginning.end()
        while expected("expected an object or the end ]", b"{", b"]") == b"{":
            yield at, line
            end = _object_end(text, at)
            if end is None:
                raise _no_array(path, line, "an object that does not end")
            at = _behind_blanks(text, end)
            if expected("expected a comma or the end ]", b",", b"]") == b",":
                at = _behind_blanks(text, at + 1)
        at = _behind_blanks(text, at + 1)
        expected("something behind the array's end", b"")


def _behind_blanks(text: mmap, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()


def _object_end(text: mmap, at: int) -> int | None:
    """Behind the object that begins here; None where the file ends before it does."""
    depth = 0
    while found := _PLAIN.match(text, at):
        bracket, at = text[found.end() : found.end() + 1], found.end() + 1
        if bracket not in (b"{", b"[", b"]", b"}"):  # the file's end, or a string up to there
            break
        depth += 1 if bracket in (b"{", b"[") else -1
        if depth == 0:
            return at
    return None


def _no_array(path: Path, line: int, what: str) -> ValueError:
    return ValueError(
        f"{path}:{line}: {what}. The file begins with [ and {{, so it has to be one JSON array of"
        " rows: mend it, or write one row to a line."
    )
