"""A family from outside the package through the whole of it: YAML, training, export, sizes."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compared_runs import losses as train
from layout_flags import TP2_PP2
from pages.commands import section
from ranks import run_ranks
from tensor_files import assert_same_weights
from transformers import AutoModelForImageTextToText, Qwen2VLForConditionalGeneration

from loongplug.convert.rank import convert
from loongplug.training.arguments import parse_arguments
from loongplug.training.config import available_models, compose_model

PACKAGE, MODEL = "qwen2_vl", "qwen2_vl_tiny"
OUTSIDE = Path(__file__).resolve().parents[1] / "models" / "outside"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(OUTSIDE))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.fixture
def outside_flags(flags: list[str]) -> list[str]:
    return [*flags, "--trusted-packages", PACKAGE, "--model-name", MODEL]


def converted(rank: int, *, flags: list[str]) -> None:
    convert(flags)


@pytest.mark.quick
def test_model_is_found_by_name_where_its_package_is_trusted() -> None:
    assert MODEL not in available_models()
    assert available_models(trusted_packages=[PACKAGE])[MODEL].parent == OUTSIDE / PACKAGE
    composed = compose_model(model_name=MODEL, trusted_packages=[PACKAGE])
    assert composed.family.name == PACKAGE
    assert composed.config.foundation.mrope_section == (4, 6, 6)  # mounted beside the model's file
    with pytest.raises(ValueError, match="there is no model qwen2_vl_tiny"):
        compose_model(model_name=MODEL)
    file = available_models(trusted_packages=[PACKAGE])[MODEL]
    with pytest.raises(ValueError, match=r"qwen2_vl\.config\.Qwen2VLConfig is not in loongplug"):
        compose_model(config_file=file)


@pytest.mark.quick
def test_own_file_mounts_yaml_of_the_outside_family(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "# @package model\ndefaults:\n  - /qwen2_vl_tiny@_here_\n"
        "  - override /decoder@foundation: qwen2_tiny\n  - _self_\n"
        "foundation:\n  num_layers: 6\n"
    )
    config = compose_model(config_file=file, trusted_packages=[PACKAGE]).config
    assert config.foundation.num_layers == 6
    assert config.image_encoder.num_layers == 3


@pytest.mark.quick
def test_model_of_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "qwen3_vl_tiny.yaml").write_text("")
    package = importlib.import_module(PACKAGE)
    family = dataclasses.replace(package.FAMILY, configs=tmp_path)
    monkeypatch.setattr(package, "LOONGPLUG_FAMILIES", (family,))
    with pytest.raises(ValueError, match=r"qwen3_vl_tiny\.yaml has the name of another model"):
        available_models(trusted_packages=[PACKAGE])


@pytest.mark.slow
def test_training_export_and_import_in_several_layouts(
    outside_flags: list[str], tmp_path: Path
) -> None:
    start, again = tmp_path / "start", tmp_path / "again"
    nothing = ("--lr", "0", "--train-iters", "1")
    train(outside_flags, *nothing, "--save-hf", str(start))
    expected = train(outside_flags, "--load-hf", str(start))
    assert expected[-1] < 0.9 * expected[0]
    layout = (*TP2_PP2, "--sequence-parallel", "--use-distributed-optimizer")
    found = train(outside_flags, "--load-hf", str(start), *layout, ranks=4)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)

    model = ("--device", "cpu", "--trusted-packages", PACKAGE, "--model-name", MODEL)
    ends = ("--load-hf", str(start), "--save-hf", str(again))
    run_ranks(converted, 4, flags=[*model, *ends, *TP2_PP2], timeout=120.0)
    assert_same_weights(start, again)
    loaded, report = AutoModelForImageTextToText.from_pretrained(again, output_loading_info=True)
    assert isinstance(loaded, Qwen2VLForConditionalGeneration)
    assert not any(report.values()), report


def test_special_tokens_are_the_family_s(
    outside_flags: list[str], demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo / "processor", tmp_path / "processor")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = tmp_path / "processor" / name
        file.write_text(file.read_text().replace("<|image_pad|>", "<image>"))
    flags = [*outside_flags, "--tokenizer-model", str(tmp_path / "processor")]
    expected = train(outside_flags, "--train-iters", "2")
    with pytest.raises(ValueError, match=r"no token <\|image_pad\|> for model.image_token_id"):
        parse_arguments(flags)
    package = importlib.import_module(PACKAGE)
    tokens = {**package.FAMILY.special_tokens, "image_token_id": "<image>"}
    family = dataclasses.replace(package.FAMILY, special_tokens=tokens)
    monkeypatch.setattr(package, "LOONGPLUG_FAMILIES", (family,))
    assert train(flags, "--train-iters", "2") == expected


@pytest.mark.quick
def test_code_of_the_docs_is_the_package_s() -> None:
    """Every line of Python in docs/adding_a_model.md stands in the package or in its tests."""
    root = Path(__file__).resolve().parents[2]
    files = [*(OUTSIDE / PACKAGE).glob("*.py"), *(root / "tests" / "models").glob("test_*.py")]
    files.append(root / "loongplug/models/qwen2_5_omni.py")  # one with two encoders
    lines = {line.strip() for file in files for line in file.read_text().splitlines()}
    docs = (root / "docs" / "adding_a_model.md").read_text()
    docs = docs.replace(section(docs, "An encoder of your own"), "")  # of a package of its own
    blocks = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    shown = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert len(blocks) == 6
    assert [line for line in shown if line not in lines] == []


def test_command_line_of_the_docs() -> None:
    """A new process, which finds the package by PYTHONPATH alone."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(OUTSIDE), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [
            *(sys.executable, "loongplug/train.py", "--device", "cpu", "--print-config"),
            *("--trusted-packages", PACKAGE, "--model-name", MODEL),
            "model.image_encoder.freeze=true",
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for part in ("VL", "Vision"):  # the whole model
        assert f"_target_: qwen2_vl.config.Qwen2{part}Config" in ended.stdout
    assert "freeze: true" in ended.stdout
