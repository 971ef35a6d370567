"""Checkpoints and adapters as Hugging Face folders, for those who only read such folders."""

import json
from pathlib import Path

import pytest
from micro.random_folder import write_random_folder
from ranks import run_ranks
from safetensors.torch import load_file
from sweeps import sweep
from typer.testing import CliRunner

from loongplug.checkpoint.settings_notes import ARCHITECTURE_FILE, for_any_layout
from loongplug.cli import app
from loongplug.convert.exported import as_hf_folder
from loongplug.convert.rank import convert
from loongplug.models.lora.mapping import adapter_table
from loongplug.training.config import compose_model
from loongplug.verify.weights import write_random_adapters

LORA = ("+model.foundation.lora.rank=3", "+model.foundation.lora.alpha=6")
MODEL = ("--model-name", "qwen3_vl_tiny", "--device", "cpu", *LORA)
ENCODER_TP2 = (
    "--tensor-model-parallel-size",
    "2",
    "model.image_encoder.tensor_model_parallel_size=2",
)


def converted(rank: int, *, flags: list[str]) -> None:
    convert(flags)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The same model as a checkpoint of two ranks, as adapters of a base, and as it shall be."""
    runs = tmp_path_factory.mktemp("runs")
    base, first = runs / "base", runs / "first"
    write_random_folder(base, model_name="qwen3_vl_tiny")
    composed = compose_model(model_name="qwen3_vl_tiny", overrides=LORA)
    table = adapter_table(composed.config, composed.family.load_hugging_face(composed.config))
    assert table is not None
    write_random_adapters(first, table, seed=1)
    source = ["--load-hf", str(base), "--load-lora", str(first)]
    targets = ["--save-lora", str(runs / "lora"), "--save-hf", str(runs / "merged")]
    flags = [*MODEL, *ENCODER_TP2, *source, *targets, "--save", str(runs / "checkpoint")]
    run_ranks(converted, 2, flags=flags, timeout=120.0)
    return runs


def weights(folder: Path) -> dict[str, object]:
    return {name: each.tolist() for name, each in load_file(folder / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(("checkpoint", "lora"), but=("checkpoint",)))
def test_both_are_the_merged_model(runs, name):
    with as_hf_folder(runs / name) as folder:
        assert weights(folder) == weights(runs / "merged")
    assert not folder.exists()
    assert weights(runs / "merged") != weights(runs / "base")


@pytest.mark.slow
def test_eval_takes_a_checkpoint(runs, tmp_path):
    row = {"messages": [{"role": "user", "content": "Read"}, {"role": "assistant", "content": "1"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    arguments = ["eval", "--data", str(tmp_path / "rows.jsonl"), "--device", "cpu"]
    arguments += ["--max-new-tokens", "2", "--predictions"]
    for name in ("checkpoint", "merged"):
        given = ["--model", str(runs / name)]
        result = CliRunner().invoke(app, [*arguments, str(tmp_path / name), *given])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "checkpoint").read_bytes() == (tmp_path / "merged").read_bytes()


def test_a_folder_is_itself(tmp_path):
    with as_hf_folder(tmp_path) as folder:
        assert folder == tmp_path


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("latest_checkpointed_iteration.txt", {}, "has no tokenizer: give --tokenizer-model DIR"),
        (
            "latest_checkpointed_iteration.txt",
            {"tokenizer_model": Path("t")},
            f"has no {ARCHITECTURE_FILE}",
        ),
        ("latest_checkpointed_iteration.txt", {"base": Path("b")}, "is a checkpoint: leave the"),
        ("adapter_config.json", {}, "are for the model None, .* --base DIR"),
        ("adapter_config.json", {"base": Path("b")}, f"has no {ARCHITECTURE_FILE}"),
        (
            "adapter_config.json",
            {"tokenizer_model": Path("t")},
            "is not a checkpoint: leave the flag",
        ),
        ("config.json", {"base": Path("b")}, "is not a folder of adapters: leave the flag out"),
    ],
)
def test_what_is_missing_is_said(tmp_path, file, options, message):
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=message), as_hf_folder(tmp_path, **options):
        pass


def test_a_note_is_plain_values():
    with pytest.raises(ValueError, match="stands for something else"):
        for_any_layout({"model": {"layers": ["${oc.env:HOME}"]}})
