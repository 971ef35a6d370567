"""Comparing answers, without a model."""

import sys

import pytest

from loongplug.evaluate.metrics import is_match, metric_named

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


@pytest.mark.parametrize(
    ("metric", "tolerance", "given", "expected", "score"),
    [
        ("contains", None, "It is a cat.", " cat\n", True),
        ("contains", None, "It is a dog.", "cat", False),
        ("number", None, "There are 1,024 of them", "1024", True),
        ("number", None, "3-4", "4", True),  # a dash between numbers is no sign
        ("number", None, "minus one is -1.0", "-1", True),
        ("number", None, "none", "4", False),
        ("number", None, "10.4", "10", False),
        ("number", 0.05, "10.4", "10", True),
        ("number", 0.05, "10.6", "10", False),
        ("number", 0.05, "-9.6", "-10", True),
        ("number", 0.05, "1e400", "10", False),
    ],
)
def test_other_metrics(metric, tolerance, given, expected, score):
    assert metric_named(metric, tolerance=tolerance).score(given, expected) is score


def test_only_functions_of_trusted_packages_are_metrics(tmp_path, monkeypatch):
    package = tmp_path / "own_scores"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from os.path import join\n"
        "def half(prediction, answer):\n    return 0.5\n"
        "def loud(prediction, answer):\n    return 7\n"
        "def broken(prediction, answer):\n    return prediction.nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    refused = "own_scores.half is in no trusted package; .* --trusted-packages"
    with pytest.raises(ValueError, match=refused):
        metric_named("own_scores.half")
    assert "own_scores" not in sys.modules  # nor was it imported
    trusted = ["own_scores"]
    metric = metric_named("own_scores.half", trusted_packages=trusted)
    assert (metric.key, metric.score("a", "b")) == ("half", 0.5)
    with pytest.raises(ValueError, match=r"own_scores.join is not a function of own_scores"):
        metric_named("own_scores.join", trusted_packages=trusted)
    with pytest.raises(ValueError, match=r"os.path.join is not in own_scores"):
        metric_named("os.path.join", trusted_packages=trusted)
    with pytest.raises(ValueError, match=r"own_scores.none does not exist"):
        metric_named("own_scores.none", trusted_packages=trusted)
    with pytest.raises(ValueError, match="gives 7: expected a number from 0 to 1"):
        metric_named("own_scores.loud", trusted_packages=trusted).score("a", "b")
    with pytest.raises(ValueError, match=r"own_scores.broken fails with AttributeError"):
        metric_named("own_scores.broken", trusted_packages=trusted).score("a", "b")


def test_a_metric_that_cannot_be_used_is_refused():
    with pytest.raises(ValueError, match="--metric is 'fuzzy': expected exact, contains, number"):
        metric_named("fuzzy")
    with pytest.raises(ValueError, match=r"--tolerance is 0.1 with --metric exact"):
        metric_named("exact", tolerance=0.1)
    with pytest.raises(ValueError, match=r"--tolerance is -0.1 with --metric number"):
        metric_named("number", tolerance=-0.1)
    with pytest.raises(ValueError, match="it has no number"):
        metric_named("number").score("4", "four")
    with pytest.raises(ValueError, match="it is empty"):
        metric_named("contains").score("4", " ")
