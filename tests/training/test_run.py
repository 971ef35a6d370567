"""Whole training runs on forked ranks: layouts, resume, SIGTERM, evaluation, export."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from compared_runs import exit_code, first_weights
from compared_runs import losses as train
from layout_flags import TP2_PP2, VIRTUAL
from ranks import RankError, run_ranks
from transformers import AutoModelForImageTextToText

from loongplug.training.run import run


def losses_and_tokens(rank: int, *, flags: list[str]) -> tuple[list[float], list[int]]:
    steps = run(flags)
    return [step.loss for step in steps], [step.tokens for step in steps]


@pytest.fixture(scope="module")
def single(flags, weights):
    """Weights and losses of the single-rank run that all layouts are held against."""
    return weights, train(flags, "--load-hf", weights)


@pytest.fixture(scope="module")
def tokens(flags):
    """The tokens that a single rank counts in each step."""
    ((_, counted),) = run_ranks(losses_and_tokens, 1, flags=flags, timeout=120.0)
    return counted


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """Losses of an uninterrupted run in WHOLE, and its checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    return train(flags, *WHOLE, "--save", str(folder), ranks=4), folder


TIED = "model.foundation.tie_word_embeddings=true"
WHOLE = (*TP2_PP2, "--use-distributed-optimizer")


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--micro-batch-size", "1", "--use-distributed-optimizer", "--overlap-grad-reduce"), 2),
        ((*TP2_PP2, "--sequence-parallel", "--micro-batch-size", "4"), 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_losses_do_not_depend_on_the_layout(flags, single, tokens, layout, ranks):
    weights, expected = single
    flags = [*flags, "--load-hf", weights, *layout]
    every = run_ranks(losses_and_tokens, ranks, flags=flags, timeout=120.0)
    assert [counted for _, counted in every] == [tokens] * ranks
    found = every[0][0]
    assert len(found) == 4
    assert expected[-1] < 0.9 * expected[0]  # it learns, so a wrong update shows
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


def test_tied_weights_load_into_virtual_stages(flags, tmp_path):
    """Building the first and the last chunk waits for each other; loading must not come between."""
    load = ("--load-hf", first_weights([*flags, TIED], tmp_path / "hf"), TIED)
    found = train(flags, *load, *VIRTUAL, ranks=2)
    torch.testing.assert_close(found, train(flags, *load), rtol=2e-5, atol=0)


def test_bf16_trains_and_exports_bf16(flags, single, tmp_path):
    weights, expected = single
    layout = (*TP2_PP2, "--sequence-parallel", "--use-distributed-optimizer", "--bf16")
    out = ("--save-hf", str(tmp_path / "hf"))
    found = train(flags, *layout, "--load-hf", weights, *out, ranks=4)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("model", ["qwen3_vl_tiny", "qwen2_5_vl_tiny"])
def test_a_checkpoint_goes_on_in_another_layout(flags, tmp_path, model):
    flags = [*flags, "--model-name", model]
    weights = first_weights(flags, tmp_path / "hf")
    expected = train(flags, "--load-hf", weights)
    save = ("--save", str(tmp_path / "run"), "--use-distributed-optimizer")
    resharded = ("--dist-ckpt-optim-fully-reshardable", "--ckpt-fully-parallel-save")
    stop = [*flags, *TP2_PP2, *save, *resharded, "--load-hf", weights, "--exit-interval", "2"]
    assert run_ranks(exit_code, 4, flags=stop, timeout=120.0) == [0, 0, 0, 0]
    found = train(flags, *save, *resharded, "--load", str(tmp_path / "run"), ranks=2)
    torch.testing.assert_close(found, expected[2:], rtol=2e-5, atol=0)


def stop_in_second_step(rank: int, *, flags: list[str]) -> int | str | None:
    """Train; rank 1 gets SIGTERM when its second global batch begins."""
    from loongplug.data import loader

    original = loader.MicrobatchLoader.__next__
    taken = 0

    def next_microbatch(self):
        nonlocal taken
        if rank == 1 and taken == 4:  # of two samples each
            os.kill(os.getpid(), signal.SIGTERM)
        taken += 1
        return original(self)

    loader.MicrobatchLoader.__next__ = next_microbatch
    return exit_code(rank, flags=flags)


def test_sigterm_on_one_rank_saves_and_ends_all(flags, whole, tmp_path):
    """The run goes on as if nothing had been, to the last bit."""
    save = ("--save", str(tmp_path))
    codes = run_ranks(stop_in_second_step, 4, flags=[*flags, *WHOLE, *save], timeout=120.0)
    assert codes == [0, 0, 0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert train(flags, *WHOLE, *save, "--load", str(tmp_path), ranks=4) == whole[0][2:]


@pytest.mark.parametrize("frozen", [pytest.param(["image_encoder", "image_projector"], id="both")])
def test_frozen_modules_keep_their_weights(flags, single, tmp_path, frozen):
    weights, _ = single
    train(
        flags,
        *(*TP2_PP2, "--use-distributed-optimizer", "--overlap-grad-reduce"),
        *("--overlap-param-gather", "--load-hf", weights, "--save-hf", str(tmp_path / "hf")),
        *(f"+model.{module}.freeze=True" for module in frozen),
        ranks=4,
    )
    before = AutoModelForImageTextToText.from_pretrained(weights).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").state_dict()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    assert not any(".visual." in name for name in moved)


def test_metrics_and_logs_are_written(flags, tmp_path):
    found = train(
        flags,
        *("--save", str(tmp_path / "run"), "--metrics-json", str(tmp_path / "metrics.json")),
        *("--tensorboard-dir", str(tmp_path / "tensorboard")),
    )
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["loss_first"] == found[0]
    assert metrics["loss_last"] == found[-1]
    assert metrics["tokens_per_second"] > 0
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "consumed samples" in log
    # Each line says what its interval has, the second one too.
    said = re.findall(r"lm loss: (\S+)", log)
    assert said == [f"{loss:.6E}" for loss in found]
    assert any(file.name.startswith("events") for file in (tmp_path / "tensorboard").iterdir())


def test_a_checkpoint_of_another_architecture_is_refused_on_every_rank(flags, whole):
    folder = str(whole[1])
    with pytest.raises(RankError, match="ffn_hidden_size") as raised:
        train(
            flags,
            *(*WHOLE, "--load", folder, "model.foundation.ffn_hidden_size=256"),
            ranks=4,
        )
    assert len(raised.value.errors) == 4


def broken_image(demo: Path, folder: Path) -> Path:
    rows = (demo / "train.jsonl").read_text().splitlines()
    row = json.loads(next(row for row in rows if '"image"' in row))
    for part in row["messages"][0]["content"]:
        if part["type"] == "image":
            part["image"] = "images/none.png"
    path = folder / "broken.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def test_bad_data_is_the_same_error_on_every_rank(flags, demo, tmp_path):
    data = ("--train-data-path", str(broken_image(demo, tmp_path)))
    with pytest.raises(RankError, match=r"broken\.jsonl:1: no image file") as raised:
        train(flags, *data, *TP2_PP2, ranks=4)
    assert len(raised.value.errors) == 4
