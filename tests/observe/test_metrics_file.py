"""The file that runs and evaluations share."""

import json

import pytest

from loongplug.observe.metrics_file import merge_metrics, read_metrics

pytestmark = pytest.mark.quick


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
