"""What each layer of a model costs a rank, in operations, counted from sizes.

A layer that is frozen, with nothing before it that trains, has no backward; one that is frozen
otherwise has as much as its forward; one that trains has twice as much. Where activations are
recomputed and gradients are needed, the backward has one forward more.
"""

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from loongplug.data.positions import Grid
from loongplug.estimate.own_ranks import OwnRanks
from loongplug.estimate.units import MicrobatchSize
from loongplug.hetero.balance import EncoderWork
from loongplug.hetero.modes import mode_of
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.entries import Entry, encoders, only_decoder
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.parallel.layout import Layout
from loongplug.training.arguments import ParsedArguments
from loongplug.training.work import BEFORE, BEHIND, Chain, Chains, LayerWork, pair_operations

_NOTHING = LayerWork(forward=0, mlp=0, backward=0, attended=0, reached=False)
_WHOLE = frozenset(("core_attn", "mlp", "others"))  # what of a layer is recomputed


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


def costs_of(
    parsed: ParsedArguments,
    microbatches: Sequence[MicrobatchSize],
    *,
    trains: Callable[[str], bool],
    apart: Collection[str] = (),
    own: Sequence[OwnRanks] = (),
) -> dict[str, EntryCosts]:
    """By entry, the decoder's last: of a microbatch with the mean media of these.

    ``trains`` says of a parameter's name whether it trains; ``apart`` are the encoders on ranks of
    their own, which are as many for a unit as their tensor parallel size. Those of which ``own``
    says so have replicas of their own, too: the busiest one's samples count. Padding counts, since
    it is computed.
    """
    model = parsed.model
    hugging_face = parsed.family.load_hugging_face(model)
    mapping = with_adapters(hugging_face.mapping, adapter_table(model, hugging_face))
    chains = Chains.of(model, mapping, trains=trains)
    entries = model.entries()
    found = {}
    placed = {each.name: each for each in own}
    for entry in encoders(entries):
        if entry.name in placed:
            part = _part_of_own(placed[entry.name], parsed.args)
        else:
            part = Fraction(1, _ranks_of_a_unit(parsed, entry, apart=entry.name in apart))
        found[entry.name] = _of_encoder(parsed, entry, chains, microbatches, part=part)
    found[only_decoder(entries).name] = _of_decoder(parsed, chains.decoder, microbatches)
    return found


@dataclass(frozen=True, kw_only=True)
class _Counted:
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


def _of_encoder(
    parsed: ParsedArguments,
    entry: Entry,
    chains: Chains,
    microbatches: Sequence[MicrobatchSize],
    *,
    part: Fraction,
) -> EntryCosts:
    """With its projector, which its last layer has beside it. ``part``: of a unit, for a rank."""
    architecture = parsed.model.encoder(entry.name)
    units = [each.units[entry.name] for each in microbatches] * part.numerator
    grids = [grid for unit in units for grid in unit.grids]
    attention = _attention_of_a_layer(architecture, grids)
    rows = _Counted(
        tokens=sum(map(prod, grids)) // architecture.rows_per_state,
        share=len(microbatches) * part.denominator,
    )
    tokens = replace(rows, tokens=sum(unit.tokens for unit in units))
    layers = chains.encoders[entry.name].layers
    projectors = [
        tokens.cost(each)
        for branch in chains.projectors[entry.name]
        for each in branch.layers.values()
    ]
    return EntryCosts(
        layers=tuple(
            rows.layer(
                layers.get(number, _NOTHING),
                attention=attention[architecture.attention_window(number)],
                recomputed=_WHOLE if architecture.recompute else frozenset(),
            )
            for number in range(architecture.computed_layers)
        ),
        first=rows.cost(layers.get(BEFORE, _NOTHING)),
        last=sum(projectors, rows.cost(layers.get(BEHIND, _NOTHING))),
    )


def _attention_of_a_layer(
    architecture: EncoderArchitecture, grids: Sequence[Grid]
) -> dict[int | None, int]:
    """Operations of a forward's products of rows with each other, by the layer's window."""
    work = EncoderWork.of(architecture)
    layers = architecture.attention_windows()
    of_one = {
        side: replace(work, linear=0, attention=((side, of_pair // layers[side]),))
        for side, of_pair in work.attention
    }
    return {side: 2 * each.of_units([grids])[0] if grids else 0 for side, each in of_one.items()}


def _part_of_own(own: OwnRanks, args: Namespace) -> Fraction:
    """Of a decoder replica's unit, what a rank of the encoder's busiest replica does meanwhile."""
    return Fraction(own.samples, args.micro_batch_size * own.layout.tp)


def _ranks_of_a_unit(parsed: ParsedArguments, entry: Entry, *, apart: bool) -> int:
    """How many ranks of one model replica share a microbatch's media, on the mean."""
    args, encoder = parsed.args, parsed.model.encoder(entry.name)
    tp, own = args.tensor_model_parallel_size, encoder.tensor_model_parallel_size
    if apart:
        return own or tp
    mode = mode_of(args, encoder)
    cp, pp = args.context_parallel_size, args.pipeline_model_parallel_size
    decoder = Layout(tp=tp, cp=cp, pp=pp)
    placement = mode.place(decoder, entry=entry, tp=own or mode.encoder_tp or tp)
    return placement.entry(entry.name).layout.tp * len(placement.edge(entry.name, rank=0).replicas)


def _of_decoder(
    parsed: ParsedArguments, chain: Chain, microbatches: Sequence[MicrobatchSize]
) -> EntryCosts:
    """With its output, which its last layer has beside it."""
    args, text = parsed.args, parsed.model.foundation
    rows = [each.segments or (args.seq_length,) * args.micro_batch_size for each in microbatches]
    counted = _Counted(
        tokens=sum(map(sum, rows)),
        share=len(rows) * args.tensor_model_parallel_size * args.context_parallel_size,
    )
    pairs = sum(length * (length + 1) // 2 for lengths in rows for length in lengths)
    recomputed = _recomputed(args)
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


def _recomputed(args: Namespace) -> frozenset[str]:
    """What of a decoder's layer is. Of selective recompute, the products and the MLP or experts."""
    if args.recompute_granularity == "full":
        return _WHOLE
    if args.recompute_granularity is None:
        return frozenset()
    modules = ("core_attn",) if args.recompute_modules is None else args.recompute_modules
    return frozenset("mlp" if each == "moe" else each for each in modules) & {"core_attn", "mlp"}
