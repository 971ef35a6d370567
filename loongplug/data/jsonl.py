"""Rows of a JSONL file by index, without holding the file in memory."""

import json
from array import array
from pathlib import Path
from typing import Any


class JsonlIndex:
    """The byte offset and line number of every row that is not blank.

    Opening reads the file once. Rows are read with a fresh file handle each, so that forked
    processes never share a file position.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"No data file at {self.path}: expected a JSONL file.")
        self._offsets = array("q")
        self._lines = array("q")
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        if not self._offsets:
            raise ValueError(f"{self.path} has no rows: a dataset needs at least one line of JSON.")

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        """``path:line`` of a row, for messages."""
        return f"{self.path}:{self._lines[index]}"

    def read(self, index: int) -> dict[str, Any]:
        """The row as a dictionary; ValueError when it is no JSON object."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            row = json.loads(line)
        except ValueError as error:  # also bytes that are no UTF-8
            raise ValueError(
                f"{self.where(index)}: not JSON ({error}). Each line must be one JSON object."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{self.where(index)}: a JSON {type(row).__name__} where an object was expected:"
                ' {"messages": [...]}.'
            )
        return row
