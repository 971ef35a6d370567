"""Steps that are not finite or have nothing to train on: what ends a run, and what it says."""

import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode
from ranks import RankError, run_ranks
from torch import Tensor, nn

from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.failure import SharedFaultError, failure_board
from loongplug.parallel.layout import Layout
from loongplug.platform import current_platform
from loongplug.platform.finite_values import is_finite, norms_before_sums
from loongplug.training import forward_step, own_ranks
from loongplug.training.run import run
from loongplug.training.step_check import MOST_EMPTY_STEPS, StepCheck

NAN = float("nan")
AT_WORK = "Largest learning rate: 0.001; loss scale: 1."
OFF = "--no-check-for-nan-in-loss-and-grad"
Fault = Callable[[ExitStack], None]


def spoilt_loss(spoil: Callable[[Tensor], Tensor], *, at: int) -> Fault:
    """The loss of microbatch ``at`` of the run, counted from 0, is another one."""
    token_loss, calls = forward_step.token_loss, 0

    def spoilt(mask: Tensor, losses: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return token_loss(mask, spoil(losses) if calls == at + 1 else losses)

    return lambda stack: stack.enter_context(patch.object(forward_step, "token_loss", spoilt))


def spoilt_gradient(name: str, *, rank: int = 0) -> Fault:
    """The gradient of one parameter is NaN from the start, on one rank."""
    init = MultimodalModel.__init__

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        parameter = dict(self.named_parameters()).get(name)
        if parameter is not None and dist.get_rank() == rank:
            parameter.register_hook(lambda gradient: gradient * NAN)

    return lambda stack: stack.enter_context(patch.object(MultimodalModel, "__init__", spoilt))


def end(rank: int, *, flags: list[str], fault: Fault) -> str:
    """What a run ends with."""
    with ExitStack() as stack:
        fault(stack)
        with pytest.raises(ValueError, match=r".") as caught:
            run(flags)
    return str(caught.value)


def test_a_loss_that_is_nan_ends_the_run_without_a_save(flags: list[str]) -> None:
    """A step has four microbatches here; without ``--save`` Megatron's way out failed."""
    fault = spoilt_loss(lambda losses: losses * NAN, at=5)
    (said,) = run_ranks(end, 1, flags=flags, fault=fault, timeout=120.0)
    start = "Iteration 2, rank 0: the loss is not finite in 1 of 4 microbatches, and norms of "
    assert said.startswith(f"{start}gradients of ")
    assert f" are not finite. {AT_WORK} Lower --lr" in said
    assert OFF in said


def test_a_run_all_of_whose_samples_are_bad_ends(flags: list[str], tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text("{}\n" * 16)
    flags = [*flags, "--train-data-path", str(data), "--bad-sample", "skip", "--packing"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "30"]
    (said,) = run_ranks(end, 1, flags=flags, fault=lambda stack: None, timeout=120.0)
    start = (
        "Iterations 1 to 20 have no token to train on, on any rank: all samples are bad (see the"
    )
    assert said.startswith(f"{start} log for each), or left out by their loss or weight.")


def trained(rank: int, *, flags: list[str], fault: Fault, store: str) -> None:
    with failure_board(lambda timeout: dist.FileStore(store, 2)), ExitStack() as stack:
        fault(stack)
        run(flags)


@pytest.mark.slow
def test_the_encoders_rank_is_named_in_full_separation(flags: list[str], tmp_path: Path) -> None:
    """Rank 1 is of the last stage; of the encoder it is a replica."""
    flags = [*flags, "--enable-full-hetero-dp", "--pipeline-model-parallel-size", "2"]
    fault = spoilt_gradient("image_projector.merger.norm.weight", rank=1)
    with pytest.raises(RankError) as raised:
        run_ranks(
            trained, 2, flags=flags, fault=fault, store=str(tmp_path / "store"), timeout=120.0
        )
    text = str(raised.value)
    assert "still ran" not in text
    assert "Iteration 1, rank 1: norms of gradients of image_projector (1 tensors" in text
    assert "gradients of image_encoder" not in text


class Built(nn.Module):
    """A chunk and an optimizer, as far as the check looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.module = nn.Module()
        self.module.image_encoder = nn.Linear(2, 1)
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.before_update: Callable[[float], bool] = lambda norm: False

    def sum_gradient(self, value: float) -> None:
        """The encoder's weight has this gradient, which replicas are about to sum."""
        weight = self.module.image_encoder.weight
        weight.main_grad = torch.full_like(weight, value)
        group = SimpleNamespace(buckets=[SimpleNamespace(params_list=[weight])])
        # This process is not to have Megatron's own, which ranks that are forked later make.
        disabled = SimpleNamespace(get_mode=lambda: RerunMode.DISABLED)
        with patch.object(rerun_state_machine, "get_rerun_state_machine", lambda: disabled):
            norms_before_sums(lambda *unused: None)(group, True, False)
        weight.main_grad.zero_()  # the sum is another's
        self.expert_parallel_bucket_groups = [group]

    def finalize(self, *, tokens: int = 7) -> None:
        with patch("megatron.training.training.finalize_model_grads") as finalize:
            self.config.finalize_model_grads_func(
                [self], torch.tensor(tokens), force_all_reduce=True
            )
        finalize.assert_called_once()

    def largest_rate(self) -> float:
        return 1e-3

    def get_loss_scale(self) -> Tensor:
        return torch.ones(1)


def looked_at(args: Namespace, step: forward_step.ForwardStep | None = None) -> Built:
    """What steps are checked with these arguments."""
    built = Built()
    check = StepCheck(args, step or forward_step.ForwardStep(current_platform()))
    check.built([built], built)  # type: ignore[arg-type]
    return built


def run_args(*, policy: str = "fatal", switch: bool = True) -> Namespace:
    return Namespace(
        rank=3, curr_iteration=4, check_for_nan_in_loss_and_grad=switch, bad_sample=policy
    )


def checked(*losses: float, norm: float = 1.0, tokens: int = 7, switch: bool = True) -> str:
    """What a step with these figures ends with; nothing where it goes on."""
    args = run_args(switch=switch)
    step = forward_step.ForwardStep(current_platform())
    built = looked_at(args, step)
    step.losses += [torch.tensor(loss) for loss in losses]
    built.finalize(tokens=tokens)
    assert step.losses == []  # also where Megatron passes over the step
    try:
        assert built.before_update(norm)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.quick
def test_losses_norm_and_tokens_are_looked_at_before_weights_change() -> None:
    assert checked(1.0, 2.0) == checked() == ""
    start = "Iteration 5, rank 3: "
    # An infinite loss may have finite gradients.
    assert checked(1.0, float("inf")).startswith(
        f"{start}the loss is not finite in 1 of 2 microbatches. {AT_WORK} Lower --lr"
    )
    norm = f"{start}the norm of all gradients is inf, though each rank's are finite"
    assert checked(norm=float("inf")).startswith(f"{norm}. {AT_WORK}")
    assert checked(1.0, norm=float("inf")).startswith(f"{norm}; this rank's losses are finite.")
    assert checked(NAN, norm=NAN, switch=False) == ""


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["skip", "fatal"])
def test_steps_without_tokens_are_passed_over_until_there_are_too_many_in_a_row(
    policy: str,
) -> None:
    """Also where bad samples end a run: rows may leave themselves out."""
    step, args = forward_step.ForwardStep(current_platform()), run_args(policy=policy, switch=False)
    built = looked_at(args, step)

    def updates(tokens: int) -> bool:
        args.curr_iteration += 1
        built.finalize(tokens=tokens)
        return built.before_update(0.0)

    for _ in range(2):
        assert [updates(0) for _ in range(MOST_EMPTY_STEPS - 1)] == [False] * 19
        assert updates(1)
    assert step.empty_steps == 2 * 19
    assert not any(updates(0) for _ in range(19))
    with pytest.raises(ValueError, match=r"^Iterations 46 to 65 have no token to train on"):
        updates(0)


@pytest.mark.quick
def test_of_ranks_that_meet_the_same_step_one_is_printed() -> None:
    """The first one is; a rank whose loss is broken knows most, and comes first."""
    args = run_args()
    step = forward_step.ForwardStep(current_platform())
    built = looked_at(args, step)
    for rank, losses, turn in ((0, [], 2), (1, [1.0], 2), (2, [1.0, NAN], 0)):
        args.rank = rank
        step.losses = [torch.tensor(loss) for loss in losses]
        built.sum_gradient(NAN)
        with pytest.raises(SharedFaultError) as caught:
            built.finalize()
        assert caught.value.turn == turn


@pytest.mark.quick
def test_the_log_is_named_where_there_is_one(tmp_path: Path) -> None:
    with (tmp_path / "rank_3.log").open("w") as file, redirect_stdout(file):
        assert f" Log: {tmp_path / 'rank_3.log'}. " in checked(NAN)
    with open(os.devnull, "w") as file, redirect_stdout(file):
        assert "Log:" not in checked(NAN)


@pytest.mark.quick
def test_gradients_are_told_by_module_and_with_their_weights() -> None:
    built = looked_at(run_args())
    weight = built.module.image_encoder.weight

    def told(gradient: float) -> str:
        built.sum_gradient(gradient)
        with pytest.raises(ValueError, match=r"^Iteration 5, rank 3: ") as caught:
            built.finalize()
        built.finalize()  # another step has gradients of its own
        return str(caught.value)

    whose = "norms of gradients of image_encoder (1 tensors, the first image_encoder.weight) are"
    assert f"{whose} not finite. {AT_WORK}" in told(NAN)
    assert f"{whose} not finite. {AT_WORK}" in told(1e30)
    built.sum_gradient(1.0)
    built.finalize()
    weight.data.fill_(NAN)
    assert f"{whose} not finite, nor are all of its weights. {AT_WORK}" in told(NAN)


@pytest.mark.quick
def test_whatever_is_not_finite_is_found() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for value in (NAN, float("inf"), float("-inf")):
            for place in (0, 500, 999):
                tensor = torch.randn(1000).to(dtype)
                assert is_finite(tensor)
                tensor[place] = value
                assert not is_finite(tensor), (dtype, value, place)
    assert is_finite(torch.zeros(0))


@pytest.mark.quick
@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_set_out_beside_the_sum_of_tokens(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder has the first rank, an encoder the second, which divides by that sum."""
    did: list[Any] = []

    class Coming:
        def __init__(self, tokens: torch.Tensor, *, async_op: bool = False) -> None:
            assert async_op
            self.tokens = tokens
            did.append("tokens")

        def wait(self) -> None:
            did.append("sum")
            self.tokens.fill_(8)

    monkeypatch.setattr(own_ranks, "decoder_layout", Layout)
    monkeypatch.setattr(own_ranks.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(own_ranks.dist, "all_reduce", Coming)
    monkeypatch.setattr(own_ranks.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(own_ranks, "finalized", lambda *_: did.append("gradients"))
    chunk = Namespace(scale_gradients=lambda factor: did.append(float(factor)))
    own_ranks.finalized_together([chunk], torch.tensor(7))
    assert did == ["tokens", "gradients", "sum", *([1 / 8] if rank else [])]
