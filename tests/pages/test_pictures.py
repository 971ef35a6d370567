"""The pictures of the pages are those of their figures."""

import pytest

from pages.pictures import (
    LEVELS,
    LEVELS_PICTURE,
    MODES,
    WHICH_MODE,
    digest,
    levels,
    steps,
)

pytestmark = pytest.mark.quick


def test_the_pictures_are_of_the_figures() -> None:
    modes, rates = steps(MODES.read_text()), levels(LEVELS.read_text())
    assert sum(len(by_share) for by_share in modes.values()) == 18
    assert {setting: len(of_setting) for setting, of_setting in rates.items()} == {
        "PP2": 5,
        "TP2": 4,
        "DP2": 2,
        "TP2 x PP2": 5,
    }
    for picture, figures in ((WHICH_MODE, modes), (LEVELS_PICTURE, rates)):
        stale = f"{picture.name} is stale: run `PYTHONPATH=tests python -m pages.pictures`"
        assert digest(figures) in picture.read_text(), stale
