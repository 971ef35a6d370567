"""The pictures of the pages are those of their figures."""

import xml.etree.ElementTree as ET

import pytest

from pages.pictures import (
    LEVELS,
    LEVELS_PICTURE,
    MODES,
    WHICH_MODE,
    levels,
    levels_picture,
    measured,
    which_mode,
)

pytestmark = pytest.mark.quick

STALE = "is stale: run `PYTHONPATH=tests python -m pages.pictures`"


def test_the_picture_of_modes_is_of_their_figures() -> None:
    found = measured(MODES.read_text(encoding="utf-8"))
    assert len(found) == 18
    drawn = which_mode(found)
    assert WHICH_MODE.read_text(encoding="utf-8") == drawn, f"docs/which_mode.svg {STALE}"
    circles = [each for each in ET.fromstring(drawn).iter() if each.tag.endswith("circle")]
    full = sum(each.get("fill") != "#ffffff" for each in circles)
    assert (len(circles), full) == (18 * 6, sum(len(each.fastest) for each in found))


def test_the_picture_of_levels_is_of_the_page_s_table() -> None:
    found = levels(LEVELS.read_text(encoding="utf-8"))
    assert {setting: len(of_setting) for setting, of_setting in found.items()} == {
        "PP2": 5,
        "TP2": 4,
        "DP2": 2,
        "TP2 x PP2": 5,
    }
    drawn = levels_picture(found)
    assert LEVELS_PICTURE.read_text(encoding="utf-8") == drawn, f"docs/levels.svg {STALE}"
    rates = [rate for of_setting in found.values() for rate in of_setting.values()]
    assert [f"{rate:.2f}" for rate in rates] == [
        text.text for text in ET.fromstring(drawn).iter() if (text.text or "")[1:2] == "."
    ]


def test_the_fastest_are_alike_within_3_percent() -> None:
    rows = ["stages,microbatches,encoder,mode,step,over_clock"]
    rows += [f"2,8,10%,{mode},{step},1.0" for mode, step in (("a", 1.02), ("b", 1.0), ("c", 1.04))]
    (found,) = measured("\n".join(rows))
    assert found.fastest == ["a", "b"]
