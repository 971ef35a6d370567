"""Steps of which every sample is bad, with ``--bad-sample skip``: they change nothing at all."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from layout_flags import OVERLAP, PP2, TP2, VPP2
from megatron.core.optimizer.optimizer import ChainedOptimizer
from ranks import run_ranks
from surveyed import settings_of
from sweeps import sweep
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from loongplug.data.check import index
from loongplug.data.data_options import RowAccess
from loongplug.data.sample_order import epoch_permutation
from loongplug.training.run import run

pytestmark = pytest.mark.slow

SEED, BATCH, STEPS = 1234, 2, 4
FULL = ("--enable-full-hetero-dp", *PP2, "--full-hetero-dp-schedule")
# A pack of one sample each: the order of the samples stays.
PACKS = ("--packing", "--packing-look-ahead", "1")
LORA = ("model.foundation.lora.rank=2",)
# Ranks, flags, and which of the four steps has no usable sample.
CASES = {
    "dp2": (2, ("--micro-batch-size", "1"), 2),
    "dp2-sharded-packs": (2, (*OVERLAP, *PACKS, "--bf16"), 3),
    "hetero-dp": (2, ("--enable-encoder-hetero-dp", *TP2), 2),
    "full-separated-vpp": (2, (*FULL, "separated", *VPP2, *OVERLAP, "--bf16"), 1),
    "full-streamed": (2, (*FULL, "streamed"), 2),
    "apart": (3, ("model.image_encoder.rank_offset=2",), 2),
    "experts": (2, ("--model-name", "qwen3_vl_moe_tiny"), 2),
}


class Seen(NamedTuple):
    """What a rank's optimizer has after each of its steps, and the rate that it took it with."""

    states: list[str]
    rates: list[float | None]
    losses: list[float | None]


def seen(rank: int, *, flags: list[str]) -> Seen:
    states: list[str] = []
    rates: list[float | None] = []
    step = ChainedOptimizer.step

    def noted(self: Any) -> Any:
        rates.append(self.largest_rate())
        result = step(self)
        states.append(digest(self))
        return result

    ChainedOptimizer.step = noted
    return Seen(states, rates, [report.loss for report in run(flags)])


def digest(chain: Any) -> str:
    """Of weights, moments, and Adam's count of steps."""
    found = hashlib.sha256()
    for optimizer in chain.chained_optimizers:
        if optimizer.is_stub_optimizer:
            continue
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                found.update(str(float(state.get("step", 0))).encode())
                for tensor in (parameter, *(state.get(n) for n in ("exp_avg", "exp_avg_sq"))):
                    if tensor is not None:
                        found.update(tensor.detach().float().numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def rows(demo: Path, tmp_path: Path):
    """A file of as many rows as the steps take, where one step's are longer than a sequence."""

    def made(bad_step: int) -> str:
        lines = (demo / "train.jsonl").read_text().splitlines()[: BATCH * STEPS]
        order = epoch_permutation(BATCH * STEPS, seed=SEED, epoch=0)
        for number in order[BATCH * (bad_step - 1) : BATCH * bad_step]:
            row = json.loads(lines[number])
            row["messages"][-1]["content"] = "7" * 200
            lines[number] = json.dumps(row)
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return made


@pytest.mark.parametrize("name", sweep(CASES, but=("dp2", "full-separated-vpp")))
def test_a_step_without_a_usable_sample_changes_nothing(
    flags: list[str], demo: Path, rows: Any, tmp_path: Path, capfd: Any, name: str
) -> None:
    """And a run that resumes behind it goes on as one that was not stopped, to the last bit."""
    ranks, layout, empty = CASES[name]
    data = rows(empty)
    settings = settings_of(demo / "processor", access=RowAccess(media_root=demo))
    index([data], settings, processes=1)
    line = [
        *(*flags, "--micro-batch-size", "1", "--global-batch-size", str(BATCH), *layout),
        *("--train-data-path", data, "--media-root", str(demo), "--bad-sample", "skip"),
        *("--lr-decay-style", "linear", "--weight-decay", "0.1", "--seed", str(SEED)),
    ]
    whole = [
        *(*line, "--save", str(tmp_path / "run"), "--save-interval", "1"),
        *("--metrics-json", str(tmp_path / "metrics.json")),
        *("--tensorboard-dir", str(tmp_path / "board")),
    ]
    found = run_ranks(seen, ranks, flags=whole, timeout=180.0)
    for states, rates, losses in found:
        assert len(states) == len(losses) == STEPS
        assert [loss is None for loss in losses] == [n == empty for n in range(1, STEPS + 1)]
        # The state after a step and its predecessor's; the rate of a step and its successor's.
        changed = [before != after for before, after in pairwise(states)]
        assert changed == [number != empty for number in range(2, STEPS + 1)]
        moved = [before != after for before, after in pairwise(rates)]
        assert moved == [number != empty for number in range(1, STEPS)]
    if name == "dp2":
        assert found[0] == found[1]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["empty_steps"] == 1
    assert metrics["loss_first"] == next(loss for loss in found[0].losses if loss is not None)
    assert metrics["bad_samples"] == {"length": BATCH}
    board = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("lm loss")
    assert [event.step for event in board] == [n for n in range(1, STEPS + 1) if n != empty]
    said = capfd.readouterr().out
    assert "2 of 8 rows of the training data (25.0%) are left out" in said
    assert f"iteration {empty} | no token to train on: it changes nothing" in said
    assert f"iteration {empty}/{STEPS} | loss none" in said
    assert "steps without a token to train on: 1" in said
    resumed = [*line, "--load", str(tmp_path / "run"), "--ckpt-step", str(empty)]
    for rest, all_of_it in zip(
        run_ranks(seen, ranks, flags=resumed, timeout=180.0), found, strict=True
    ):
        assert rest == Seen(*(values[empty:] for values in all_of_it))
