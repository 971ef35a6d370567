"""The blocks at a run's start and end."""

import html
import io
import shlex
from argparse import Namespace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import shown

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.training.arguments import parse_arguments
from loongplug.training.config import compose_model
from loongplug.training.freezing import freezing_of
from loongplug.training.summary import end_facts, print_facts, start_facts

pytestmark = pytest.mark.quick


def text_of(facts: Any) -> str:
    file = io.StringIO()
    print_facts(facts, args=Namespace(rank=0), file=file)
    return file.getvalue()


def started(
    flags: list[str],
    *more: str,
    samples: int | None = 64,
    evaluation: str | None = None,
    logs: Path | None = None,
) -> str:
    parsed = parse_arguments([*flags, *more])
    model = parsed.model
    hugging_face = parsed.family.load_hugging_face(model)
    datasets: Any = SimpleNamespace(train=range(64), samples=samples, evaluation=evaluation)
    return text_of(
        start_facts(
            parsed,
            mapping=with_adapters(hugging_face.mapping, adapter_table(model, hugging_face)),
            freezing=freezing_of(parsed.args, model),
            datasets=datasets,
            logs=logs,
        )
    )


def test_what_a_run_says_before_it_begins(flags, tmp_path, monkeypatch):
    """Of two replicas; adapters beside an encoder with a rate of its own and a frozen projector."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    data = flags[flags.index("--train-data-path") + 1]
    said = started(
        flags,
        *("--tensor-model-parallel-size", "2", "--enable-full-hetero-dp", "--save-interval", "2"),
        *("--save", str(tmp_path / "run"), "--save-hf", str(tmp_path / "hf")),
        *("model.foundation.lora.rank=4", "model.image_encoder.lr_mult=0.1"),
        "model.image_projector.freeze=true",
    )
    # By hand: adapters of rank 4 of four layers, in and out of four linears each.
    adapters = 4 * 4 * (128 + 128 + 128 + 384 + 256 + 128 + 768 + 128)
    assert said == (
        "model       qwen3_vl_tiny: 1.35 M parameters, 236 k train, fp32\n"
        "            image_encoder: 203 k, trains, lr_mult 0.1\n"
        "            image_projector: 297 k, frozen\n"
        f"            foundation: 853 k, {adapters / 1000:.3g} k train, LoRA of rank 4\n"
        "layout      4 ranks on cpu; TP 2, DP 2; image_encoder: full separation, TP 1\n"
        f"rows        64 of {data}; 8 a step; 8 steps an epoch; the run has 4 steps, 0.5 epochs\n"
        "start       random weights\n"
        f"saves       checkpoints to {tmp_path}/run every 2 steps; "
        f"the model for transformers to {tmp_path}/hf at the end\n"
    )


def test_the_page_shows_what_a_run_shows(demo, tmp_path, monkeypatch):
    """In its text and in its picture; a run is not needed to know it."""
    monkeypatch.chdir(tmp_path)
    Path("demo").symlink_to(demo)
    _, train = shown.command().split("loongplug train ")
    flags = shlex.split(train.replace("\\\n", " "))
    logs = Path("runs/lora/checkpoints/logs")
    evaluation = "16 of 16 rows, each once, in 2 steps of 8"
    block = started(flags, logs=logs, evaluation=evaluation)
    args = parse_arguments(flags).args
    logs.parent.mkdir(parents=True)
    (logs.parent / TRACKER).write_text("16")
    block += text_of(end_facts(args))
    page, picture = shown.PAGE.read_text(), shown.PICTURE.read_text()
    stale = "make it again: PYTHONPATH=tests python -m pages.shown"
    for line in block.splitlines():
        assert f"\n{line}\n" in page, stale
        assert html.escape(line[12:]).replace(" ", "&#160;") in picture, stale


def test_packs_a_ramp_and_checkpoints(flags, tmp_path):
    (tmp_path / TRACKER).write_text("4")
    ramp = (
        *("--rampup-batch-size", "2", "2", "12", "--load", str(tmp_path), "--micro-batch-size"),
        *("1", "--packing", "--lr-warmup-iters", "1"),
    )
    said = started(flags, *ramp, samples=20)
    assert "; 2 to 8 a step; planned packs, about 5 steps an epoch; the run has 4 steps, 0." in said
    assert f"start       resumed from iteration 4 of {tmp_path}\n" in said
    assert "saves       nothing: --save DIR keeps checkpoints, --save-hf DIR" in said
    said = started(flags, *ramp, "--finetune", samples=None)
    assert "; packed as they come; the run has 4 steps\n" in said
    assert f"start       weights of iteration 4 of {tmp_path}\n" in said
    (tmp_path / TRACKER).write_text("release")  # of a conversion
    assert f"start       weights of {tmp_path}\n" in started(flags, *ramp)


def test_a_layout_names_virtual_stages_and_encoders_of_their_own(flags, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stages = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
    said = started(flags, *stages, "--global-batch-size", "16")
    assert "layout      2 ranks on cpu; PP 2, VPP 2; image_encoder: uniform\n" in said
    monkeypatch.setenv("WORLD_SIZE", "4")
    apart = ("rank_offset=2", "data_parallel_size=2", "tensor_model_parallel_size=1")
    own = [f"model.image_encoder.{each}" for each in apart]
    said = started(flags, "--tensor-model-parallel-size", "2", *own)
    layout = "4 ranks on cpu; TP 2; image_encoder: ranks of its own, from rank 2 on, TP 1, DP 2\n"
    assert f"layout      {layout}" in said


def test_experts_count_as_often_as_there_are_some(flags):
    model = ("--model-name", "qwen3_vl_moe_tiny")
    composed = compose_model(model_name=model[1])
    tensors = composed.family.load_hugging_face(composed.config).mapping.sources()
    total = sum(map(prod, tensors.values()))
    assert f"qwen3_vl_moe_tiny: {total / 10**6:.3g} M parameters" in started(flags, *model)


def ended(**given: Any) -> Namespace:
    none = dict.fromkeys(("save", "save_hf", "save_lora", "valid_data_path", "media_root"))
    others = {"tokenizer_model": "tok", "trusted_packages": [], "finetune": False}
    return Namespace(**none | others | given)


def test_what_a_run_says_at_its_end(tmp_path):
    save = str(tmp_path)
    nothing = "saved       nothing; in another run, --save DIR keeps"
    assert text_of(end_facts(ended())).startswith(nothing)
    assert text_of(end_facts(ended(save=save))).startswith(nothing)
    (tmp_path / TRACKER).write_text("8\n")
    assert text_of(end_facts(ended(save=save), ended_early=True)) == (
        f"saved       iteration 8 in {save}\ngoing on    the same command with --load {save}\n"
    )
    assert text_of(end_facts(ended(save=save))) == (
        f"saved       iteration 8 in {save}\n"
        f"next        loongplug eval --model {save} --data DATA.jsonl --tokenizer-model tok\n"
        f"going on    the same command with --load {save} and more --train-iters or --epochs\n"
    )
    exports = ended(save_hf="hf", save_lora="ad apters", valid_data_path=["valid.jsonl"])
    assert text_of(end_facts(exports)) == (
        "saved       the model for transformers in hf\n"
        "saved       the adapters in ad apters\n"
        "next        loongplug eval --model hf --data valid.jsonl\n"
    )
    adapters = ended(save_lora="ad apters")
    assert "eval --model 'ad apters' --data DATA.jsonl" in text_of(end_facts(adapters))
    finetuned = ended(save=save, finetune=True)
    assert text_of(end_facts(finetuned)).endswith("--epochs, without --finetune\n")
    assert text_of(end_facts(exports, ended_early=True)).startswith(nothing)
