"""What each layer of a model costs a rank, in operations, counted from sizes.

A layer that is frozen, with nothing before it that trains, has no backward; one that is frozen
otherwise has as much as its forward; one that trains has twice as much. Where activations are
recomputed and gradients are needed, the backward has one forward more.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from loongplug.models.amounts import (
    WHOLE,
    Amounts,
    EntryAmounts,
    LayerWork,
    operations,
    text_extent,
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Operations of one rank for one microbatch; what is recomputed is of the backward.

    ``again``, of one layer, is what its backward has besides where it is recomputed.
    """

    forward: int = 0
    backward: int = 0
    again: int = 0

    @classmethod
    def of(cls, work: LayerWork, extent: Amounts, *, share: int, parts: frozenset[str]) -> Self:
        """The cost of all microbatches in a layer; ``share``: their number x the ranks of one."""
        ways = (work.forward, work.backward, work.again(parts))
        forward, backward, again = (round(operations(each, extent) / share) for each in ways)
        return cls(forward=forward, backward=backward, again=again)

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(forward=self.forward + other.forward, backward=self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class EntryCosts:
    """The costs of an entry's layers, and of what the ``first`` and ``last`` have beside them.

    Of each stage the foremost ``recomputed`` layers are recomputed; None: all of them.
    """

    layers: tuple[Cost, ...]
    first: Cost = Cost()
    last: Cost = Cost()
    recomputed: int | None = None

    @classmethod
    def of(cls, work: EntryAmounts, extent: Amounts, *, share: int, parts: frozenset[str]) -> Self:
        """As :meth:`Cost.of`, without what lies beside the entry's own layers."""
        first, *layers, last = (
            Cost.of(each, extent, share=share, parts=parts) for each in work.layers
        )
        return cls(layers=tuple(layers), first=first, last=last)

    def stage(self, start: int, stop: int) -> Cost:
        """The cost of a stage with the layers from ``start`` to before ``stop``."""
        layers = self.layers[start:stop]
        again = sum(each.again for each in layers[: self.recomputed])
        found = sum(layers, Cost(backward=again))
        found += self.first if start == 0 else Cost()
        return found + (self.last if stop == len(self.layers) else Cost())

    def whole(self) -> Cost:
        return self.stage(0, len(self.layers))


def decoder_costs(
    args: Namespace, decoder: EntryAmounts, rows: Sequence[Sequence[int]]
) -> EntryCosts:
    """The mean costs of a decoder's microbatches, with the output beside the last layer.

    ``rows`` are, by microbatch, the tokens that see each other.
    """
    share = len(rows) * args.tensor_model_parallel_size * args.context_parallel_size
    found = EntryCosts.of(
        decoder, text_extent(chain(*rows)), share=share, parts=recomputed_parts(args)
    )
    block = args.recompute_num_layers if args.recompute_method == "block" else None
    return replace(found, recomputed=block)


def recomputed_parts(args: Namespace) -> frozenset[str]:
    """The parts of a decoder's layer that are recomputed: products, the MLP or experts, or all."""
    if args.recompute_granularity == "full":
        return WHOLE
    if args.recompute_granularity is None:
        return frozenset()
    modules = ("core_attn",) if args.recompute_modules is None else args.recompute_modules
    return frozenset("mlp" if each == "moe" else each for each in modules) & {"core_attn", "mlp"}
