"""Comparing answers, without a model."""

import pytest

from loongplug.evaluate.report import Tally, is_match, tally, tally_by_kind

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("given", "expected", "match"),
    [
        ("123", "123", True),
        (" 123\n", "123", True),
        ("123", "123 ", True),
        ("12 3", "123", False),
        ("1234", "123", False),
        ("", "123", False),
        ("A", "a", False),
        ("", " ", True),
    ],
)
def test_only_white_space_around_an_answer_is_forgiven(given, expected, match):
    assert is_match(given, expected) is match


def test_scores_per_kind_add_up():
    matches = [True, False, True, True, False]
    kinds = ["read", "read", "count", None, None]
    assert tally(matches) == Tally(correct=3, total=5)
    assert tally(matches).share == 0.6
    assert tally_by_kind(matches, kinds) == {
        "count": Tally(correct=1, total=1),
        "read": Tally(correct=1, total=2),
    }
    assert tally_by_kind([True], [None]) == {}
    assert tally([]).share == 0.0
