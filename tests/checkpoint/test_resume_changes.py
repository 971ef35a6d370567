"""A run may go on with other learning rates and more frozen, with each kind of optimizer."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from full_state import Kept, State, read_state, run_and_keep_state
from ranks import RankError, run_ranks

PP2, FULL = ("--pipeline-model-parallel-size", "2"), "--enable-full-hetero-dp"
DISTRIBUTED = "--use-distributed-optimizer"
FREEZE, TRAIN = "--freeze-parameters", "--train-parameters"


def kept(flags: list[str], *more: str, folder: Path, ranks: int = 1) -> Kept:
    """The same on every rank, but for those without parameters."""
    found = run_ranks(
        run_and_keep_state, ranks, flags=[*flags, *more], folder=folder, timeout=240.0
    )
    assert len({str(each.rates) for each in found}) == 1
    assert {str(each.steps) for each in found} <= {str(found[-1].steps), "[]"}
    return found[-1]


def by_module(found: Kept) -> dict[str, tuple[float, float, float]]:
    """The rates of a module are those of its biases, too."""
    rates = {module: rates for (module, _), rates in found.rates.items()}
    assert all(rates[module] == each for (module, _), each in found.rates.items())
    return rates


def same_where_trained(found: Mapping[str, State], expected: Mapping[str, State]) -> set[str]:
    """The names of what has state, which has to be the expected one, bit by bit."""
    trained = {name for name, tensor in found["exp_avg_sq"].items() if tensor.any()}
    for kind, tensors in found.items():
        for name in trained if kind != "weights" else tensors:
            assert torch.equal(tensors[name], expected[kind][name]), f"{kind} of {name}"
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_rates_and_what_is_frozen_may_change(run_flags, tmp_path, distributed):
    kind = (DISTRIBUTED,) if distributed else ("--bf16",)
    given = [*run_flags, *kind, "--lr-decay-style", "linear", "--lr-decay-iters", "8"]
    # Frozen where the first of two stages has its decoder layers, and nothing of some groups.
    given += [FREEZE, "text_decoder.decoder.layers.[01].*", "*word_embeddings*"]
    first = [*given, *PP2, FULL, "+model.image_projector.lr_mult=2.0"]
    saved = kept(first, "--save", str(tmp_path / "saved"), folder=tmp_path / "a", ranks=2)
    assert saved.steps == [2.0]
    rates = {name: rate[:2] for name, rate in by_module(saved).items()}
    assert rates["image_projector"] == (2e-3, 0.0)
    assert rates["image_encoder"] == rates["text_decoder"] == (1e-3, 0.0)

    given += ["--load", str(tmp_path / "saved")]
    other = ["--lr", "4e-4", "--min-lr", "4e-5", "+model.image_encoder.lr_mult=0.5"]
    # No biases nor norms any more, so that groups are left out.
    other += [FREEZE, "text_decoder.decoder.layers.[01].*", "*word_embeddings*", "*.bias", "*norm*"]
    own = kept(given, *other, "--override-opt-param-scheduler", folder=tmp_path / "b")
    rates = by_module(own)
    assert {name: rate[:2] for name, rate in rates.items()} == {
        "image_encoder": (2e-4, 2e-5),
        "image_projector": (4e-4, 4e-5),
        "text_decoder": (4e-4, 4e-5),
    }
    assert rates["text_decoder"][2] == pytest.approx(4e-4 - (4e-4 - 4e-5) * 2 / 8)
    assert own.steps == [2.0]
    before = read_state(tmp_path / "a")
    trained = same_where_trained(read_state(tmp_path / "b"), before)
    everything = {name for name, tensor in before["exp_avg_sq"].items() if tensor.any()}
    assert trained == {name for name in everything if "norm" not in name and ".bias" not in name}

    if distributed:
        with pytest.raises(RankError, match=r"max_lr was 0\.001, is 0\.0004 \(--lr\)"):
            kept(given, *other, folder=tmp_path / "c")
        return
    as_saved = kept(given, *other, "--use-checkpoint-opt-param-scheduler", folder=tmp_path / "c")
    for module, found in by_module(as_saved).items():
        high, least, rate = by_module(saved)[module]
        assert found == (high, least, pytest.approx(rate))
