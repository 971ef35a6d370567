"""What each layer of a model costs a rank, in operations, counted from sizes.

A layer that is frozen, with nothing before it that trains, has no backward; one that is frozen
otherwise has as much as its forward; one that trains has twice as much. Where activations are
recomputed and gradients are needed, the backward has one forward more.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from loongplug.models.architecture import TextArchitecture
from loongplug.training.work import BEFORE, BEHIND, Chain, LayerWork, pair_operations

# What of a layer is recomputed.
WHOLE = frozenset(("core_attn", "mlp", "others"))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Operations of one rank for one microbatch; what is recomputed is of the backward."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.forward + self.backward

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(forward=self.forward + other.forward, backward=self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class LayerCost(Cost):
    """Of one layer; ``again`` is what its backward has besides where it is recomputed."""

    again: int = 0


@dataclass(frozen=True, kw_only=True)
class EntryCosts:
    """Of an entry's layers, and of what the ``first`` and the ``last`` of them have beside them.

    Of each stage the foremost ``recomputed`` layers are recomputed; None stands for all of them.
    """

    layers: tuple[LayerCost, ...]
    first: Cost = Cost()
    last: Cost = Cost()
    recomputed: int | None = None

    def stage(self, start: int, stop: int) -> Cost:
        """Of a stage with the layers from ``start`` to before ``stop``."""
        layers = self.layers[start:stop]
        again = sum(each.again for each in layers[: self.recomputed])
        found = sum(layers, Cost(backward=again))
        found += self.first if start == 0 else Cost()
        return found + (self.last if stop == len(self.layers) else Cost())

    def whole(self) -> Cost:
        """Of all of it on one stage."""
        return self.stage(0, len(self.layers))


@dataclass(frozen=True, kw_only=True)
class Counted:
    """So many ``tokens`` of all microbatches, by ``share``: microbatches times ranks of one."""

    tokens: int
    share: int

    def cost(self, work: LayerWork) -> Cost:
        """Without attention and recompute."""
        return Cost(
            forward=round(work.forward * self.tokens / self.share),
            backward=round(work.backward * self.tokens / self.share),
        )

    def layer(self, work: LayerWork, *, attention: int, recomputed: frozenset[str]) -> LayerCost:
        """``attention``: operations of a forward's products of the tokens with each other."""
        again = 0
        if work.reached:
            again += attention if "core_attn" in recomputed else 0
            again += work.mlp * self.tokens if "mlp" in recomputed else 0
            again += (work.forward - work.mlp) * self.tokens if "others" in recomputed else 0
        backward = work.backward * self.tokens + 2 * work.attended * attention
        return LayerCost(
            forward=round((work.forward * self.tokens + attention) / self.share),
            backward=round(backward / self.share),
            again=round(again / self.share),
        )


def decoder_costs(
    args: Namespace, text: TextArchitecture, chain: Chain, rows: Sequence[Sequence[int]]
) -> EntryCosts:
    """Of a decoder's microbatch, with its output, which its last layer has beside it.

    ``rows`` are, by microbatch, the tokens that see each other; the mean of all microbatches
    counts.
    """
    counted = Counted(
        tokens=sum(map(sum, rows)),
        share=len(rows) * args.tensor_model_parallel_size * args.context_parallel_size,
    )
    pairs = sum(length * (length + 1) // 2 for lengths in rows for length in lengths)
    recomputed = recomputed_parts(args)
    return EntryCosts(
        layers=tuple(
            counted.layer(
                chain.layers[number],
                attention=pairs * pair_operations(text),
                recomputed=recomputed,
            )
            for number in range(text.num_layers)
        ),
        first=counted.cost(chain.layers[BEFORE]),
        last=counted.cost(chain.layers[BEHIND]),
        recomputed=args.recompute_num_layers if args.recompute_method == "block" else None,
    )


def recomputed_parts(args: Namespace) -> frozenset[str]:
    """What of a decoder's layer is. Of selective recompute, the products and the MLP or experts."""
    if args.recompute_granularity == "full":
        return WHOLE
    if args.recompute_granularity is None:
        return frozenset()
    modules = ("core_attn",) if args.recompute_modules is None else args.recompute_modules
    return frozenset("mlp" if each == "moe" else each for each in modules) & {"core_attn", "mlp"}
