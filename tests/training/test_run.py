"""Whole training runs on forked ranks: layouts, resume, SIGTERM, evaluation, export."""

import json
import os
import re
import signal

import pytest
import torch
from compared_runs import exit_code
from compared_runs import losses as train
from layout_flags import TP2_PP2
from ranks import RankError, run_ranks
from transformers import AutoModelForImageTextToText


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """Losses of an uninterrupted run in WHOLE, and its checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    return train(flags, *WHOLE, "--save", str(folder), ranks=4), folder


WHOLE = (*TP2_PP2, "--use-distributed-optimizer")


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
def test_frozen_modules_keep_their_weights(flags, weights, tmp_path, frozen):
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
