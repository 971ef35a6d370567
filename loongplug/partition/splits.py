"""From the flags of a run to two splits of its layers, of which the better one is kept."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.estimate.run_of_flags import OwnRanks, own_ranks_of, run_of
from loongplug.hetero.modes import mode_of
from loongplug.hetero.recorded_schedule import first_stage
from loongplug.models.amounts import WHOLE, Amounts, ModelAmounts, media_extent
from loongplug.models.entries import Entry, encoders, only_decoder
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.parallel.layout import Layout
from loongplug.partition.stages import Partition, partition
from loongplug.training.arguments import ParsedArguments
from loongplug.training.config import compose_asked_for
from loongplug.training.flags import read_command_line, without_flags
from loongplug.training.freezing import freezing_of
from loongplug.training.layer_costs import Cost, EntryCosts, decoder_costs
from loongplug.training.rules.layout import stages_of_layout
from loongplug.training.rules.rule import ranks_apart

AWARE, PLAIN = "frozen-aware", "plain"
LAYOUT = "--pipeline-model-parallel-layout"
# What says otherwise how layers are split, and makes way for what is found.
_SPLITS = frozenset(
    (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
        "pipeline_model_parallel_layout",
    )
)


@dataclass(frozen=True, kw_only=True)
class FoundSplits:
    """Two splits of the layers of a run, the frozen-aware one first.

    ``apart`` are the encoders with stages of their own, of which ``own`` have ranks of their own by
    the run's flags; ``inside`` are those that the decoder's first stage has, ``around`` those that
    work on all of its stages, before its schedule and behind it. ``replaced`` are flags of the run
    that the split stands for.
    """

    parsed: ParsedArguments
    microbatches: int
    partitions: tuple[Partition, Partition]
    decoder: str
    apart: tuple[str, ...]
    own: tuple[str, ...]
    inside: tuple[str, ...]
    around: tuple[str, ...]
    replaced: tuple[str, ...]

    @property
    def kept(self) -> Partition:
        """The one with the shorter step; of two that are equal, the frozen-aware one."""
        return min(self.partitions, key=lambda each: each.step)

    @property
    def flags(self) -> tuple[str, ...]:
        """What a run with the kept split is given; nothing where the decoder has one stage."""
        sizes = self.kept.sizes(self.decoder)
        return (LAYOUT, layout_text(sizes)) if len(sizes) > 1 else ()


def find(
    flags: Sequence[str],
    *,
    ranks: int,
    visual_tokens: int | None,
    encoder_stages: Sequence[str],
    folder: Path,
) -> FoundSplits:
    """The splits of the run of these flags; as the command's options say.

    Raises:
        ValueError: the flags or options cannot be used, or there is nothing to split.
    """
    line = read_command_line(flags)
    args, pp = line.args, line.args.pipeline_model_parallel_size
    composed = compose_asked_for(args, overrides=line.overrides).config
    if pp < 2 and not encoder_stages and not ranks_apart(composed):
        raise ValueError(
            f"--pipeline-model-parallel-size is {pp}, so that there are no stages to split layers "
            "into: give 2 or more, or stages of an encoder by --encoder-stages NAME=N"
        )
    layers, chunks = composed.foundation.num_layers, 1
    if pp > 1:
        chunks = _virtual_stages(args, layers)
        flags = without_flags(flags, _SPLITS)
        if pp <= layers:  # a start would refuse layers that do not divide
            places = pp * chunks if pp * chunks <= layers else pp
            each, more = divmod(layers, places)
            even = [each + (place < more) for place in range(places)]
            flags = [*flags, LAYOUT, layout_text(even)]
    parsed, step_of = run_of(flags, ranks=ranks, visual_tokens=visual_tokens, folder=folder)
    model, microbatches = parsed.model, step_of({0: None})
    names = [entry.name for entry in encoders(model.entries())]
    own = own_ranks_of(parsed.args, model)
    given = _stages_of_encoders(encoder_stages, model=model, names=names)
    stages = {each.name: each.layout.pp for each in own} | given
    apart = {name: stages[name] for name in names if name in stages}
    around = [
        name
        for name in names
        if name not in apart and mode_of(parsed.args, model.encoder(name)).on_every_stage
    ]
    inside = [name for name in names if name not in {*apart, *around}]
    decoder = only_decoder(model.entries()).name
    trains = freezing_of(parsed.args, model).trains
    real, plain = (
        costs_of(parsed, microbatches, trains=each, apart=apart, own=own)
        for each in (trains, lambda name: True)
    )
    for costs in (real, plain):  # what the first stage does for encoders is in its first layer's
        first = sum((costs[name].whole() for name in inside), costs[decoder].first)
        costs[decoder] = replace(costs[decoder], first=first)
    aware, unaware = (
        partition(
            name,
            real,
            believed=believed,
            stages={**apart, decoder: pp},
            microbatches=len(microbatches),
            around=around,
            pipeline=replace(first_stage(parsed.args), chunks=chunks),
        )
        for name, believed in ((AWARE, real), (PLAIN, plain))
    )
    return FoundSplits(
        parsed=parsed,
        microbatches=len(microbatches),
        partitions=(aware, unaware),
        decoder=decoder,
        apart=tuple(apart),
        own=tuple(each.name for each in own),
        inside=tuple(inside),
        around=tuple(around),
        replaced=tuple(flag for name, flag in line.flags.items() if name in _SPLITS),
    )


def costs_of(
    parsed: ParsedArguments,
    microbatches: Sequence[Microbatch],
    *,
    trains: Callable[[str], bool],
    apart: Collection[str] = (),
    own: Sequence[OwnRanks] = (),
) -> dict[str, EntryCosts]:
    """The costs of each entry, the decoder's last, for a microbatch with the mean media of these.

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
    rows = [  # a pack's samples, and the padding behind them
        (each.split.length,) * args.micro_batch_size
        if each.segments is None
        else (*each.segments, each.split.length - each.tokens)
        for each in microbatches
    ]
    found[only_decoder(entries).name] = decoder_costs(args, amounts.decoder, rows)
    return found


def _of_encoder(
    amounts: ModelAmounts, name: str, units: Sequence[Unit], *, part: Fraction
) -> EntryCosts:
    """The costs of an encoder with its projector, for a rank that does ``part`` of a unit."""
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


def layout_text(sizes: Sequence[int]) -> str:
    """Stages of so many decoder layers as Megatron's flag has them.

    >>> layout_text([1, 3])
    'Et|t*3L'
    """
    return "E" + "|".join("t" if size == 1 else f"t*{size}" for size in sizes) + "L"


def _virtual_stages(args: Namespace, layers: int) -> int:
    """How many of them each of the decoder's ranks has."""
    pp, each = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    if args.pipeline_model_parallel_layout:
        return stages_of_layout(args) // pp or 1
    if each:
        return -(-layers // (pp * each))
    return args.num_virtual_stages_per_pipeline_rank or 1


def _stages_of_encoders(
    given: Sequence[str], *, model: Any, names: Sequence[str]
) -> dict[str, int]:
    """The stages of encoders by name, in the model's order, from NAME=N with a YAML's names."""
    known = {model.keys[name]: name for name in names}
    found = {}
    for each in given:
        key, _, number = each.partition("=")
        if key not in known or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"--encoder-stages {each}: expected NAME=N, with one of {', '.join(known)} and how "
                "many stages it gets, 1 or more"
            )
        if int(number) > 1 and isinstance(model.encoder(known[key]), HuggingFaceEncoderConfig):
            raise ValueError(
                f"--encoder-stages {each}: transformers computes this encoder in one piece, so "
                f"expected {key}=1, or one of LoongPlug's own encoders"
            )
        found[known[key]] = int(number)
    return {name: found[name] for name in names if name in found}
