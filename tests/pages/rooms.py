"""The rooms of the house, which are the folders of loongplug, as the docs show them.

``PYTHONPATH=tests python -m pages.rooms docs/architecture.md`` writes the table there; without a
file it is printed.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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


def rooms(package: Path = _PACKAGE) -> list[Room]:
    """Those of ``package``, from the top floor down.

    Raises:
        graphlib.CycleError: rooms import one another in a circle.
    """
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    texts = {
        folder.name: [file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))]
        for folder in folders
    }
    names = {*texts}
    imports = {
        name: {found for text in files for found in _IMPORT.findall(text)} & names - {name}
        for name, files in texts.items()
    }
    floors = _floors(imports)
    found = [
        Room(
            name=folder.name,
            what=first_sentence((folder / "__init__.py").read_text(encoding="utf-8")),
            lines=sum(map(_lines, texts[folder.name])),
            floor=floors[folder.name],
        )
        for folder in folders
    ]
    return sorted(found, key=lambda room: (-room.floor, room.name))


def first_sentence(source: str) -> str:
    """Of a module's docstring, in one line of Markdown."""
    said = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    return said.split(". ")[0].rstrip(".").replace("``", "`")


def markdown(found: Sequence[Room], *, beside: Mapping[str, int]) -> str:
    """The table; ``beside`` are the lines of files that lie in no room, by name."""
    rows = [(str(each.floor), f"`{each.name}`", each.what, each.lines) for each in found]
    rows.append(("", "no room", ", ".join(f"`{name}`" for name in beside), sum(beside.values())))
    whole = sum(lines for *_, lines in rows)
    return "\n".join(
        [
            "| floor | room | what lives there | lines |",
            "| ---: | --- | --- | ---: |",
            *(_line(*cells, f"{round(lines, _ROUNDED):,}") for *cells, lines in rows),
            _line("", "**all**", "", f"**{round(whole, _ROUNDED):,}**"),
        ]
    )


def shown(table: str) -> Iterator[tuple[str, int, int]]:
    """Of a table that :func:`markdown` made, each room's name, floor and lines."""
    for row in table.splitlines():
        if found := re.fullmatch(r"\| (\d+) \| `(\w+)` \| .* \| ([\d,]+) \|", row):
            yield found[2], int(found[1]), int(found[3].replace(",", ""))


def files_beside(package: Path = _PACKAGE) -> dict[str, int]:
    """The lines of files that lie in no room, by name."""
    files = sorted(package.glob("*.py"))
    return {file.name: _lines(file.read_text(encoding="utf-8")) for file in files}


def _floors(imports: Mapping[str, set[str]]) -> dict[str, int]:
    floors: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        floors[name] = max((1 + floors[each] for each in imports[name]), default=0)
    return floors


def _lines(text: str) -> int:
    return len(text.splitlines())


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    write(sys.argv[1:], {MARK: markdown(rooms(), beside=files_beside())})
