"""What is told of a tokenizer folder that is not the weights' own."""

import json
import shutil
from pathlib import Path

import pytest

from loongplug.training.special_tokens import folder_differences
from loongplug.verify.tiny_processor import write_processor

pytestmark = pytest.mark.quick


def test_other_ids_or_colours_than_those_of_the_weights_are_told_in_one_line(
    tmp_path: Path,
) -> None:
    own, given = tmp_path / "own", tmp_path / "given"
    write_processor(own)
    shutil.copytree(own, given)
    assert not list(folder_differences(own, given))
    assert not list(folder_differences(tmp_path / "nowhere", given))
    file = given / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = vocabulary[-2:]  # pairs of text and score, whose places are the ids
    vocabulary[-2:] = second, first
    text = min(first[0], second[0])
    file.write_text(json.dumps(content))
    (line,) = folder_differences(own, given)
    said = f"2 tokens have other ids, such as {text!r}"
    assert line == f"{given} is not of the weights' own folder {own}: {said}."
    file = given / "preprocessor_config.json"
    content = json.loads(file.read_text())
    mean = content["image_mean"]
    file.write_text(json.dumps({**content, "image_mean": [0.1, 0.2, 0.3]}))
    (line,) = folder_differences(own, given)
    assert line.endswith(f"; image_mean is [0.1, 0.2, 0.3], not {mean}.")
