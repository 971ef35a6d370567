"""What each layer of a model costs a rank, of the mean microbatch of a data set."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.estimate.microbatches import segments_of
from loongplug.estimate.own_ranks import OwnRanks
from loongplug.hetero.modes import mode_of
from loongplug.models.amounts import WHOLE, Amounts, ModelAmounts, media_extent
from loongplug.models.entries import Entry, encoders, only_decoder
from loongplug.parallel.layout import Layout
from loongplug.training.arguments import ParsedArguments
from loongplug.training.layer_costs import Cost, EntryCosts, decoder_costs


def costs_of(
    parsed: ParsedArguments,
    microbatches: Sequence[Microbatch],
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
    args, model = parsed.args, parsed.model
    amounts = ModelAmounts.of(model, parsed.family.load_hugging_face(model), trains=trains)
    entries = model.entries()
    placed = {each.name: each for each in own}
    found = {}
    for entry in encoders(entries):
        if entry.name in placed:  # what its busiest replica's ranks do of a decoder replica's unit
            busiest = placed[entry.name]
            part = Fraction(busiest.samples, args.micro_batch_size * busiest.layout.tp)
        else:
            part = Fraction(1, _ranks_of_a_unit(parsed, entry, apart=entry.name in apart))
        units = [each.units[entry.name] for each in microbatches]
        found[entry.name] = _of_encoder(amounts, entry.name, units, part=part)
    rows = [
        segments_of(each) or (each.split.length,) * args.micro_batch_size for each in microbatches
    ]
    found[only_decoder(entries).name] = decoder_costs(args, amounts.decoder, rows)
    return found


def _of_encoder(
    amounts: ModelAmounts, name: str, units: Sequence[Unit], *, part: Fraction
) -> EntryCosts:
    """With its projector, which its last layer has beside it. ``part``: of a unit, for a rank."""
    encoder, own = amounts.model.encoder(name), amounts.entries[name]
    share = len(units) * part.denominator
    units = [*units] * part.numerator
    costs = EntryCosts.of(
        own,
        media_extent(encoder, [grid for unit in units for grid in unit.grids]),
        share=share,
        parts=WHOLE if encoder.recompute else frozenset(),
    )
    tokens: Amounts = Counter({"states": sum(unit.tokens for unit in units)})
    projectors = (Cost.of(each, tokens, share=share, parts=frozenset()) for each in own.beside)
    return replace(costs, last=sum(projectors, costs.last))


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
