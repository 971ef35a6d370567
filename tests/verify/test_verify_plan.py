"""How many ranks a layout takes, and how its flags become two runs."""

from argparse import Namespace
from pathlib import Path

import pytest
from verify_cases import made_plan

from loongplug.models.hf_config import hf_config
from loongplug.models.lora.mapping import adapter_table
from loongplug.models.registry import families
from loongplug.training.config import compose_model
from loongplug.training.flags import read_command_line
from loongplug.verify.forked_runs import plan_runs
from loongplug.verify.plan import Request, least_world
from loongplug.verify.weights import write_random_adapters

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, 1),
        ({"tp": 2, "pp": 4}, 8),
        ({"cp": 2, "tp": 2}, 4),
        ({"ep": 4}, 4),
        ({"ep": 4, "tp": 2}, 8),  # experts are split as the rest is
        ({"ep": 4, "tp": 2, "etp": 1}, 4),
        ({"ep": 2, "tp": 4, "etp": 1, "pp": 2}, 8),
        ({"tp": 2, "etp": 4}, 4),
    ],
)
def test_the_smallest_world(sizes, expected):
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    given = {f"{name}_parallel_size": sizes.get(key, 1) for key, name in names.items()}
    args = Namespace(**given, expert_tensor_parallel_size=sizes.get("etp"))
    assert least_world(args) == expected


@pytest.mark.not_quick
def test_both_runs_have_the_same_batch_model_and_weights(tmp_path):
    plan = made_plan(
        tmp_path,
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--global-batch-size", "64", "--train-data-path", "elsewhere.jsonl", "--save", "run"),
        *("--num-virtual-stages-per-pipeline-rank", "2", "--sequence-parallel"),
        *("--rampup-batch-size", "8", "8", "64"),
        ranks=8,
    )
    assert any("steps of one size" in note for note in plan.notes)
    layout, reference = read_command_line(plan.layout), read_command_line(plan.reference)
    assert plan.ranks == 8
    assert layout.args.tensor_model_parallel_size == 2
    assert layout.args.rampup_batch_size is reference.args.rampup_batch_size is None
    assert reference.args.tensor_model_parallel_size == 1
    assert not reference.args.sequence_parallel
    for name in (
        *("global_batch_size", "micro_batch_size", "load_hf", "train_data_path", "lr", "seed"),
        *("seq_length", "tokenizer_model", "model_name", "train_iters"),
    ):
        assert getattr(layout.args, name) == getattr(reference.args, name), name
    assert layout.args.global_batch_size == 8  # two replicas, two pipelines full each
    assert layout.args.train_data_path == [str(tmp_path / "data" / "train.jsonl")]
    assert layout.args.save is None
    assert reference.overrides[: len(layout.overrides)] == layout.overrides
    assert (tmp_path / "weights" / "model.safetensors").is_file()


@pytest.mark.not_quick
def test_a_folder_of_weights_says_what_model_it_is_also_where_they_are_replaced(tmp_path):
    names = families()["qwen3_vl"].special_tokens
    ids = [f"model.{name}={number}" for number, name in enumerate(names)]
    composed = compose_model(model_name="qwen3_vl_tiny", overrides=ids)
    folder = tmp_path / "My-Model-0.5B"
    hf_config(composed.family.load_hugging_face(composed.config)).save_pretrained(folder)
    flags = ("--device", "cpu", "--load-hf", str(folder), "model.image_encoder.freeze=true")
    plan = plan_runs(Request(flags=flags, scale="tiny"), folder=tmp_path / "work")
    assert plan.model == folder.name
    for argv in (plan.layout, plan.reference):
        line = read_command_line(argv)
        file = Path(line.args.config_file)
        found = compose_model(config_file=file, overrides=line.overrides).config
        assert found.image_encoder.freeze
        assert line.args.load_hf != str(folder)  # random weights of the small likeness


@pytest.mark.not_quick
def test_a_folder_of_adapters_says_which_there_are_also_where_they_are_replaced(demo, tmp_path):
    overrides = ("model.foundation.lora.rank=3", "model.foundation.lora.alpha=6")
    composed = compose_model(model_name="qwen3_vl_tiny", overrides=overrides)
    described = composed.family.load_hugging_face(composed.config)
    table = adapter_table(composed.config, described)
    write_random_adapters(tmp_path / "given", table, seed=1)
    plan = made_plan(tmp_path, "--load-lora", str(tmp_path / "given"))
    line = read_command_line(plan.layout)
    assert line.args.load_lora == str(tmp_path / "adapters")  # random ones of the small likeness
    found = compose_model(model_name="qwen3_vl_tiny", overrides=line.overrides).config
    assert (found.foundation.lora.rank, found.foundation.lora.scale) == (3, 2.0)
