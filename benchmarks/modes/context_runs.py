"""Runs of a comparison: their steps' rates, losses, and what a decoder's forward keeps."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from loongplug.data.microbatch import Microbatch
from loongplug.models.hf_mapping import Mapping
from loongplug.training.forward_step import LossReport
from loongplug.verify.ranks import OnEvent, join, run_ranks
from modes.cores import on_own_core

_MINUTES = 10.0
_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class ContextRunFigures:
    """What a run measured; ``losses`` are those of all steps."""

    rate: float  # tokens a second before padding, of the median step after the warm-up
    losses: tuple[float, ...]
    activations: int  # bytes that the first forward of the first rank's decoder keeps


def measured_run(
    flags: Sequence[str], *, ranks: int, warmup: int, folder: Path, on_step: Callable[[], None]
) -> ContextRunFigures:
    """Train as ``flags`` say, each rank on a core of its own. ``folder`` is new.

    Raises:
        ValueError: the flags cannot be used.
        RankError: a rank failed otherwise.
    """
    figures: list[ContextRunFigures] = run_ranks(
        partial(_train, flags=flags, warmup=warmup, folder=folder),
        ranks,
        folder=folder,
        on_event=lambda line: on_step(),
        timeout=_SECONDS,
    )
    return figures[0]


def _train(
    rank: int, tell: OnEvent, *, flags: Sequence[str], warmup: int, folder: Path
) -> ContextRunFigures:
    import torch.distributed as dist

    from loongplug.training.run import run

    on_own_core(rank)
    join(rank, folder=folder, device="cpu", minutes=_MINUTES)
    kept = _KeptByDecoder()
    reports = run(flags, watch=kept, on_report=lambda _: tell("step") if rank == 0 else None)
    dist.barrier()  # a rank that ends early closes its sockets while others still use them
    return ContextRunFigures(
        rate=median(each.tokens / each.seconds for each in reports[warmup:]),
        losses=tuple(each.loss for each in reports if each.loss is not None),
        activations=kept.bytes,
    )


class _KeptByDecoder:
    """Counts what the first training forward of a rank's decoder keeps for its backward.

    A storage counts once. Parameters do not count, nor what comes into the decoder.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def built(self, chunks: Sequence[Any], optimizer: Any, *, mapping: Mapping) -> None:
        """See :class:`loongplug.training.run.Watch`."""
        (decoder,) = (
            module
            for name, module in chunks[0].named_modules()
            if name.rpartition(".")[2] == "text_decoder"
        )
        entered = ExitStack()
        storages: dict[int, Any] = {}
        own = {each.untyped_storage().data_ptr() for each in decoder.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage  # held, so that no other has its place
            return tensor

        def begin(*_: Any) -> None:
            entered.enter_context(
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            )

        def end(*_: Any) -> None:
            entered.close()
            self.bytes = sum(each.nbytes() for each in storages.values())
            storages.clear()
            for each in hooks:
                each.remove()

        hooks = [decoder.register_forward_pre_hook(begin), decoder.register_forward_hook(end)]

    def loss(self, microbatch: Microbatch, report: LossReport) -> None:
        """Nothing."""
