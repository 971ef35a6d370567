"""The rooms on the page are those of the tree."""

import pytest

from pages.commands import ROOT
from pages.marked import content
from pages.rooms import MARK, rooms, shown

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
