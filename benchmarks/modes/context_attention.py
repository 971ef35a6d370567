"""Attention over parts of rows on ranks of a core each: errors, times, and what travels."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loongplug.context.balance import balanced
from loongplug.context.row_parts import Balance, RowParts
from loongplug.context.segments import Segments
from loongplug.context.tiles import grouped, tiles
from loongplug.context.token_split import ContextShard, TokenSplit, zigzag
from loongplug.models.layers.context.attention import ContextAttention
from loongplug.models.layers.context.kernels import attend, attend_backward
from loongplug.models.layers.context.row import context_row
from loongplug.models.layers.context.tile_attention import Gradients, Merged
from loongplug.models.layers.inputs import PackedSegments
from loongplug.verify.ranks import OnEvent, join
from modes.context_work import ContextWork, document_lengths, packs_of
from modes.cores import on_own_core

COMM_TYPES = ("all_gather", "a2a", "p2p")
_MINUTES = 5.0
_PLANNED_FOR = 8  # ranks


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """What the ranks measured together; times are by round."""

    error: float  # the worst of outputs and gradients, to float64, over the largest value
    wire: float  # received elements over 6 T G d (N - 1) / N
    tiles: tuple[float, ...]  # all tiles of a row's parts over one call for the row
    lpt_over_zigzag: tuple[float, ...]  # rates of attention alone, over the same packs
    imbalance_lpt: float  # slowest rank over mean by count, the worst of those packs
    imbalance_zigzag: float
    most: float  # times the rate, if the slowest rank's pairs were all that takes time
    plan_ms: float  # of a pack of `planned` tokens for 8 ranks


def measured_attention(
    rank: int, tell: OnEvent, *, work: ContextWork, rounds: int, folder: Path
) -> AttentionFigures | None:
    """The life of a rank; the first one has the figures."""
    on_own_core(rank)
    join(rank, folder=folder, device="cpu", minutes=_MINUTES)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    bench = _Bench(work, rank=rank)
    error = bench.error()
    tell("errors")
    wire = bench.wire()
    ratios, rates = [], []
    for number in range(rounds):
        ratios.append(bench.tiles_over_one_call() if rank == 0 else 0.0)
        dist.barrier()
        rates.append(bench.lpt_over_zigzag(turned=bool(number % 2)))
        tell("attention")
    plan_ms = bench.plan_ms() if rank == 0 else 0.0
    dist.barrier()  # a rank that ends early closes its sockets while others still use them
    if rank > 0:
        return None
    return AttentionFigures(
        error=error,
        wire=wire,
        tiles=tuple(ratios),
        lpt_over_zigzag=tuple(rates),
        imbalance_lpt=max(bench.imbalance(each, "lpt") for each in bench.packs),
        imbalance_zigzag=max(bench.imbalance(each, "zigzag") for each in bench.packs),
        most=bench.most(),
        plan_ms=plan_ms,
    )


class _Bench:
    def __init__(self, work: ContextWork, *, rank: int) -> None:
        self._work, self._rank = work, rank
        self._ranks = dist.get_world_size()
        self.packs = packs_of(work, work.packs)

    def error(self) -> float:
        """Of all ways of communication, over a row of one sample and over a pack."""
        length = self._work.exact_length
        worst = 0.0
        rows: tuple[tuple[list[int], Balance], ...] = (
            ([length], "zigzag"),
            (document_lengths(length, seed=0), "lpt"),
        )
        for lengths, balance in rows:
            given = self._drawn(length)
            exact = _exact(*(each.double() for each in given), lengths=lengths)
            split = self._split(lengths, balance)
            mine = torch.from_numpy(split.parts[self._rank].places)
            for comm_type in COMM_TYPES:
                found = self._attended(comm_type, split, lengths, [each[mine] for each in given])
                for ours, whole in zip(found, exact, strict=True):
                    apart = (ours.double() - whole[mine]).abs().max() / whole.abs().max()
                    worst = max(worst, float(apart))
        told = torch.tensor(worst)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told)

    def wire(self) -> float:
        """Elements that come by all_gather, forward and backward, over what they have to be."""
        work = self._work
        length = work.exact_length
        split = zigzag(length, cp=self._ranks)
        mine = torch.from_numpy(split.parts[self._rank].places)
        with _Received(self._ranks) as received:
            given = [each[mine] for each in self._drawn(length)]
            self._attended("all_gather", split, [length], given)
        least = 6 * length * work.groups * work.dim * (self._ranks - 1) / self._ranks
        return received.elements / least

    def tiles_over_one_call(self) -> float:
        """Forward and backward of a row: the tiles of all its parts, over one causal call."""
        length = self._work.length
        # As the kernels take them, [1, heads, s, dim].
        q, k, v, grad = (each.permute(1, 2, 0, 3).contiguous() for each in self._drawn(length))
        whole, row = ContextShard.whole(length), Segments.of([length])
        parts = zigzag(length, cp=self._ranks).parts
        places = [torch.from_numpy(part.places) for part in parts]
        own = [
            ([x[:, :, mine].contiguous() for x in (q, grad)], grouped(tiles(part, whole, row)))
            for part, mine in zip(parts, places, strict=True)
        ]

        def one_call() -> None:
            out, lse = attend(q, k, v, causal=True, scale=None)
            attend_backward(grad, q, k, v, out, lse, causal=True, scale=None)

        def all_tiles() -> None:
            for (queries, its_grad), groups in own:
                merged = Merged(queries, scale=None)
                merged.add(k, v, groups)
                found = Gradients(its_grad, q=queries, out=merged.out, lse=merged.lse, scale=None)
                found.add(k, v, groups)

        tiled, whole_row = _seconds(all_tiles, one_call)
        return tiled / whole_row

    def lpt_over_zigzag(self, *, turned: bool) -> float:
        """The rate of attention over the packs, all ranks waiting for the slowest of each."""
        took: dict[Balance, float] = {"lpt": 0.0, "zigzag": 0.0}
        for lengths in self.packs:
            given = self._drawn(self._work.pack_length)
            for balance in (*took,)[:: -1 if turned else 1]:
                split = self._split(lengths, balance)
                mine = torch.from_numpy(split.parts[self._rank].places)
                own = [each[mine].contiguous() for each in given]
                dist.barrier()
                begun = time.perf_counter()
                self._attended("all_gather", split, lengths, own)
                dist.barrier()
                took[balance] += time.perf_counter() - begun
        return took["zigzag"] / took["lpt"]

    def plan_ms(self) -> float:
        """Of one plan of a long pack."""
        segments = Segments.of(document_lengths(self._work.planned, seed=0))
        (took,) = _seconds(lambda: balanced(segments, cp=_PLANNED_FOR), turns=15)
        return 1e3 * took

    def imbalance(self, lengths: Sequence[int], balance: Balance) -> float:
        """Pairs of query and key of the slowest rank over the mean."""
        pairs = self._pairs(lengths, balance)
        return float(pairs.max() / pairs.mean())

    def most(self) -> float:
        """Pairs of the slowest rank of each pack, with a zigzag over lpt."""
        zigzags, balanced_ones = (
            sum(int(self._pairs(each, balance).max()) for each in self.packs)
            for balance in ("zigzag", "lpt")
        )
        return zigzags / balanced_ones

    def _pairs(self, lengths: Sequence[int], balance: Balance) -> NDArray[np.int64]:
        """Pairs of query and key of each rank, int64 [ranks]."""
        row, split = Segments.of(lengths), self._split(lengths, balance)
        return np.array([(part.places - row.starts(part.places) + 1).sum() for part in split.parts])

    def _split(self, lengths: Sequence[int], balance: Balance) -> TokenSplit:
        parts = RowParts(cp=self._ranks, rank=self._rank, balance=balance)
        return parts.of(sum(lengths), segments=lengths).split

    def _drawn(self, length: int) -> list[Tensor]:
        """Query, key, value [length, 1, heads, dim], and the output's gradient of such heads."""
        work = self._work
        generator = torch.Generator().manual_seed(length)
        return [
            torch.randn(length, 1, heads, work.dim, generator=generator)
            for heads in (work.heads, work.groups, work.groups, work.heads)
        ]

    def _attended(
        self, comm_type: str, split: TokenSplit, lengths: Sequence[int], given: list[Tensor]
    ) -> list[Tensor]:
        """Output and gradients of this rank's tokens. Collective."""
        module = self._module(comm_type)
        row = context_row(split, lengths, rank=self._rank, device="cpu")
        *inputs, grad = given
        leaves = [each.detach().requires_grad_() for each in inputs]
        params = PackedSegments(qkv_format="sbhd", context=row)
        out = module(*leaves, None, packed_seq_params=params)
        found = torch.autograd.grad(out, leaves, grad.flatten(2))
        return [out.detach().view_as(grad), *found]

    def _module(self, comm_type: str) -> ContextAttention:
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        work = self._work
        config = TransformerConfig(
            num_layers=1,
            hidden_size=work.heads * work.dim,
            num_attention_heads=work.heads,
            num_query_groups=work.groups,
            kv_channels=work.dim,
            attention_dropout=0.0,
            context_parallel_size=self._ranks,
        )
        return ContextAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=comm_type)


class _Received(TorchDispatchMode):
    """Counts the elements that collectives of equal pieces bring from other ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.elements = 0
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.elements += args[0].numel() * (self._ranks - 1) // self._ranks
        return func(*args, **(kwargs or {}))


def _exact(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, *, lengths: Sequence[int]
) -> list[Tensor]:
    """Output and gradients of a whole row, segment by segment, by torch's own attention."""
    leaves = [each.requires_grad_() for each in (query, key, value)]
    outs = []
    for pieces in zip(*(each.split(list(lengths)) for each in leaves), strict=True):
        q, k, v = (each.permute(1, 2, 0, 3) for each in pieces)  # [b, heads, s, d]
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outs.append(found.permute(2, 0, 1, 3))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _seconds(*works: Callable[[], object], turns: int = 3) -> list[float]:
    """Of the processor, for each work the median of some turns, in each of which all are done.

    A turn before them does not count.
    """
    took: list[list[float]] = [[] for _ in works]
    for turn in range(1 + turns):
        for work, its in zip(works, took, strict=True):
            begun = time.process_time()
            work()
            if turn:
                its.append(time.process_time() - begun)
    return [median(its) for its in took]
