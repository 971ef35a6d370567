"""The rooms of the house, which are the folders of loongplug, as the docs show them.

``PYTHONPATH=tests python -m pages.rooms docs/architecture.md`` writes the table there; without a
file it is printed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from pages.commands import ROOT
from pages.marked import write

MARK = "rooms"

_PACKAGE = ROOT / "loongplug"
_IMPORT = re.compile(r"^\s*(?:from|import) loongplug\.(\w+)", re.MULTILINE)
_ROUNDED = -1  # lines on the page, to tens


@dataclass(frozen=True, kw_only=True)
class Room:
    """A folder: what lives there by its docstring, its lines of Python, and its floor.

    A room stands one floor above the highest of those that it imports.
    """

    name: str
    what: str
    lines: int
    floor: int


def rooms() -> list[Room]:
    """All rooms, from the top floor down.

    Raises:
        graphlib.CycleError: rooms import one another in a circle.
    """
    folders = {path.parent.name: path.parent for path in _PACKAGE.glob("*/__init__.py")}
    texts = {name: _texts(sorted(each.rglob("*.py"))) for name, each in folders.items()}
    imports = {
        name: {*_IMPORT.findall("\n".join(files))} & {*texts} - {name}
        for name, files in texts.items()
    }
    floors: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        floors[name] = max((1 + floors[each] for each in imports[name]), default=0)
    found = [
        Room(
            name=name,
            what=_first_sentence((folder / "__init__.py").read_text(encoding="utf-8")),
            lines=_lines(texts[name]),
            floor=floors[name],
        )
        for name, folder in folders.items()
    ]
    return sorted(found, key=lambda room: (-room.floor, room.name))


def _texts(files: list[Path]) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in files]


def _lines(texts: list[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


def _first_sentence(source: str) -> str:
    """Of a module's docstring, in one line of Markdown."""
    said = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    return said.split(". ")[0].rstrip(".").replace("``", "`")


def markdown() -> str:
    """The table; files that lie in no room stand below."""
    rows = [(f"{each.floor}", f"`{each.name}`", each.what, each.lines) for each in rooms()]
    files = sorted(_PACKAGE.glob("*.py"))
    names = ", ".join(f"`{file.name}`" for file in files)
    rows.append(("", "no room", names, _lines(_texts(files))))
    whole = sum(lines for *_, lines in rows)
    return "\n".join(
        [
            "| floor | room | what lives there | lines |",
            "| ---: | --- | --- | ---: |",
            *(
                f"| {floor} | {name} | {what} | {round(lines, _ROUNDED):,} |"
                for floor, name, what, lines in rows
            ),
            f"|  | **all** |  | **{round(whole, _ROUNDED):,}** |",
        ]
    )


def shown(table: str) -> Iterator[tuple[str, int, int]]:
    """Of a table that :func:`markdown` made, each room's name, floor and lines."""
    for row in table.splitlines():
        if found := re.fullmatch(r"\| (\d+) \| `(\w+)` \| .* \| ([\d,]+) \|", row):
            yield found[2], int(found[1]), int(found[3].replace(",", ""))


if __name__ == "__main__":
    write(sys.argv[1:], {MARK: markdown()})
