"""The rooms on the page are those of the tree."""

from graphlib import CycleError
from pathlib import Path

import pytest

from pages.commands import ROOT
from pages.marked import content
from pages.rooms import MARK, Room, files_beside, rooms, shown

pytestmark = pytest.mark.quick

PAGE = ROOT / "docs" / "architecture.md"
APART = 0.1  # of a room's lines: they change with every commit


def test_the_page_has_the_rooms_of_the_tree() -> None:
    """By name and floor; lines within 10 %, and what is said of a room not at all."""
    found = {name: (floor, lines) for name, floor, lines in shown(content(PAGE.read_text(), MARK))}
    tree = {room.name: room for room in rooms()}
    stale = (
        "docs/architecture.md is stale: "
        "run 'PYTHONPATH=tests python -m pages.rooms docs/architecture.md'"
    )
    assert {name: floor for name, (floor, _) in found.items()} == {
        name: room.floor for name, room in tree.items()
    }, stale
    for name, (_, lines) in found.items():
        assert lines == pytest.approx(tree[name].lines, rel=APART, abs=5), (name, stale)


def house(folder: Path, **rooms: str) -> Path:
    for name, text in rooms.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f'"""Room ``{name}``,\nhere. More."""\n')
        (folder / name / "file.py").write_text(text)
    (folder / "cli.py").write_text("from loongplug.top import file\n")
    return folder


def test_a_room_stands_above_those_that_it_imports(tmp_path: Path) -> None:
    built = house(
        tmp_path,
        top="from loongplug.middle.file import A\nimport loongplug.low\n",
        middle="def late():\n    from loongplug.low import file\n",
        low="from loongplug.low.other import B\nfrom loongplug.paths import C\n",
    )
    assert rooms(built) == [
        Room(name="top", what="Room `top`, here", lines=4, floor=2),
        Room(name="middle", what="Room `middle`, here", lines=4, floor=1),
        Room(name="low", what="Room `low`, here", lines=4, floor=0),
    ]
    assert files_beside(built) == {"cli.py": 1}


def test_a_circle_of_rooms_is_told(tmp_path: Path) -> None:
    built = house(tmp_path, one="import loongplug.two\n", two="import loongplug.one\n")
    with pytest.raises(CycleError):
        rooms(built)
