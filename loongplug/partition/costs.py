"""What each layer of a model costs a rank, of the mean microbatch of a data set."""

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from loongplug.data.positions import Grid
from loongplug.estimate.own_ranks import OwnRanks
from loongplug.estimate.units import MicrobatchSize
from loongplug.hetero.balance import EncoderMacs
from loongplug.hetero.modes import mode_of
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.entries import Entry, encoders, only_decoder
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.parallel.layout import Layout
from loongplug.training.arguments import ParsedArguments
from loongplug.training.layer_costs import (
    WHOLE,
    Counted,
    EntryCosts,
    decoder_costs,
)
from loongplug.training.work import BEFORE, BEHIND, Chains, LayerWork

_NOTHING = LayerWork(forward=0, mlp=0, backward=0, attended=0, reached=False)


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
    args = parsed.args
    rows = [each.segments or (each.row_length,) * args.micro_batch_size for each in microbatches]
    decoder = decoder_costs(args, model.foundation, chains.decoder, rows)
    found[only_decoder(entries).name] = decoder
    return found


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
    rows = Counted(
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
                recomputed=WHOLE if architecture.recompute else frozenset(),
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
    work = EncoderMacs.of(architecture)
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
