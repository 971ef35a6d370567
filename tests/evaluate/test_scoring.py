"""Comparing answers, without a model."""

import json

import pytest

from loongplug.evaluate.report import merge_metrics, read_metrics
from loongplug.evaluate.scoring import Tally, is_match, tally, tally_by_kind

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


def test_metrics_join_what_the_file_already_has(tmp_path):
    path = tmp_path / "deep" / "metrics.json"
    merge_metrics(path, {"exact_match": 0.5})
    path.write_text(json.dumps({"loss_last": 0.1, "exact_match": 0.0}))
    merge_metrics(path, {"exact_match": 0.75, "eval_samples": 4})
    assert read_metrics(path) == {"loss_last": 0.1, "exact_match": 0.75, "eval_samples": 4}
    assert [file.name for file in path.parent.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize("content", ["[1]", "{", ""])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, content):
    path = tmp_path / "metrics.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="give another file"):
        merge_metrics(path, {"exact_match": 1.0})
    assert path.read_text() == content
