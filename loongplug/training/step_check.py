"""The check of each step: losses and gradients are finite, and tokens train, or nothing changes."""

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from loongplug.parallel.failure import SharedFaultError
from loongplug.parallel.module_ddp import bucket_groups_of
from loongplug.parallel.optimizer_per_module import OptimizerPerModule
from loongplug.platform.finite_values import is_finite, take_broken
from loongplug.training.forward_step import ForwardStep

SWITCH = "--no-check-for-nan-in-loss-and-grad"
MOST_EMPTY_STEPS = 20  # in a row
_CURE = (
    "Lower --lr, lengthen --lr-warmup-iters, or look at the data and at the weights that were "
    f"loaded; --load goes on from the last checkpoint. {SWITCH} trains on regardless."
)


def finalized(model: Any, num_tokens: Tensor | None, **options: Any) -> None:
    from megatron.training import training  # asked each time: a trace puts its own there

    training.finalize_model_grads(model, num_tokens, **options)


class StepCheck:
    """A look at each step of a run before it changes a weight.

    The norms of gradients are taken before replicas sum them, so that the rank that made them is
    known, and looked at behind the last backward. Losses and the number of trained tokens are
    looked at where the host waits for the gradients' norm anyway. No collectives: what is summed
    over ranks, Megatron has summed.
    """

    def __init__(
        self, args: Namespace, step: ForwardStep, *, finalize: Callable[..., None] = finalized
    ) -> None:
        """``finalize`` sums gradients and divides them by the tokens, as Megatron's does."""
        self._args = args
        self._step = step
        self._sum = finalize
        self._chunks: Sequence[Any] = ()
        self._optimizer: OptimizerPerModule | None = None
        # Of the step whose gradients are summed: this rank's losses, and over all ranks how many
        # tokens it trains on.
        self._losses: list[Tensor] = []
        self._tokens: Tensor | None = None
        self._empty_in_a_row = 0

    def built(self, chunks: Sequence[Any], optimizer: OptimizerPerModule) -> None:
        """Look at what is trained from now on: the wrapped chunks and their optimizer."""
        self._chunks, self._optimizer = chunks, optimizer
        get_model_config(chunks[0]).finalize_model_grads_func = self._finalize
        optimizer.before_update = self._look

    def _finalize(self, model: Any, num_tokens: Tensor | None = None, **options: Any) -> None:
        assert num_tokens is not None, "losses are sums over tokens"
        self._sum(model, num_tokens, **options)
        self._tokens = num_tokens  # summed by now
        # Here, as a step whose scaled gradients are too large for fp32 is passed over by Megatron.
        self._losses, self._step.losses = self._step.losses, []
        broken = take_broken(group for chunk in self._chunks for group in bucket_groups_of(chunk))
        if broken:
            what = _gradients(self._chunks, broken)
            raise self._error(what, losses=self._losses, turn=0)

    def _look(self, norm: float) -> bool:
        """Whether the step may change weights; the same on every rank."""
        losses = self._losses
        assert self._tokens is not None
        if self._tokens.item() == 0:
            self._empty_in_a_row += 1
            self._step.empty_steps += 1
            # Of rows that leave themselves out, or are bad: these end a run elsewhere, if they do.
            if self._empty_in_a_row < MOST_EMPTY_STEPS:
                return False
            raise ValueError(
                f"Iterations {self._iteration - MOST_EMPTY_STEPS + 1} to {self._iteration} have no"
                " token to train on, on any rank: all samples are bad (see the log for each), or "
                "left out by their loss or weight. Look at the data with loongplug data check."
            )
        self._empty_in_a_row = 0
        if not self._args.check_for_nan_in_loss_and_grad:
            return True
        if losses and not is_finite(torch.stack(losses)):
            raise self._error("", losses=losses, turn=1)
        if not math.isfinite(norm):
            what = f"the norm of all gradients is {norm}, though each rank's are finite"
            raise self._error(what, losses=losses, turn=1)
        return True

    @property
    def _iteration(self) -> int:
        return int(self._args.curr_iteration) + 1

    def _error(self, what: str, *, losses: Sequence[Tensor], turn: int) -> SharedFaultError:
        """What this rank says, with ``what`` it has found beside its losses.

        Of ranks that meet the same step one is printed: one whose losses are not finite, or one of
        ``turn`` 0, which knows whose gradients are not.
        """
        broken = sum(not is_finite(loss) for loss in losses)
        if broken:
            lost = f"the loss is not finite in {broken} of {len(losses)} microbatches"
            what = f"{lost}, and {what}" if what else lost
        elif losses:
            what += "; this rank's losses are finite"
        assert self._optimizer is not None
        rate = self._optimizer.largest_rate()
        at_work = "" if rate is None else f"Largest learning rate: {rate:g}; "
        scale = self._optimizer.get_loss_scale().item()
        # Where Megatron's output is redirected, this is the file.
        log = Path(str(getattr(sys.stdout, "name", "")))
        place = f" Log: {log}." if log.is_file() else ""
        return SharedFaultError(
            f"Iteration {self._iteration}, rank {self._args.rank}: {what}. "
            f"{at_work}loss scale: {scale:g}.{place} {_CURE}",
            turn=turn if broken else turn + 2,
        )


def _gradients(chunks: Sequence[Any], parameters: Sequence[nn.Parameter]) -> str:
    """Whose gradients ``parameters`` have, by module, and whether their weights are finite."""
    broken = {id(parameter) for parameter in parameters}
    names: dict[str, list[str]] = {}
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            if id(parameter) in broken:
                plain = name.removeprefix("module.")
                names.setdefault(plain.partition(".")[0], []).append(plain)
    said = " and ".join(
        f"{module} ({len(tensors)} tensors, the first {tensors[0]})"
        for module, tensors in names.items()
    )
    weights = "" if all(is_finite(each) for each in parameters) else ", nor are all of its weights"
    return f"norms of gradients of {said} are not finite{weights}"
