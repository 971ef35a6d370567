"""The microbatches of a first step, and who encodes them on ranks of their own."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from loongplug.context.row_parts import RowParts
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch, Unit
from loongplug.data.planned_media import EncoderUnits
from loongplug.data.sample import Grid
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.hetero.modes import mode_of
from loongplug.hetero.placement import ApartPiece
from loongplug.models.entries import encoders
from loongplug.parallel.layout import Layout
from loongplug.training.datasets import DatasetProvider
from loongplug.training.own_ranks import decoder_layout_of
from loongplug.training.provider import engine_of
from loongplug.training.rank_data import row_lengths_of

# The microbatches of a decoder replica's step, by the replica.
StepOf = Callable[[int], Sequence[Microbatch]]


def step_of_data(args: Namespace, model: Any, *, step: int = 0) -> StepOf:
    """Microbatches of the data that the flags name, in a step that is counted from 0.

    Reads the text parts and the headers of media only.

    Raises:
        ValueError: the data do not fit the model, or a row cannot be used.
    """
    provider = DatasetProvider(args, model, engine=engine_of(args, model))
    dataset, entries = provider.train, encoders(model.entries())
    processor = dataset.processor

    def of_replica(replica: int) -> list[Microbatch]:
        source = LocalSource(
            dataset,
            sizes=StepSizes.constant(args.global_batch_size),
            micro_batch_size=args.micro_batch_size,
            parts={replica: None},
            dp_size=args.data_parallel_size,
            seed=args.seed,
            encoders={each.name: EncoderUnits(kinds=each.media, loads=()) for each in entries},
            consumed_samples=step * args.global_batch_size,
            bad_samples=provider.bad_samples,
            look_ahead=args.packing_look_ahead if args.packing else None,
        )
        loader = MicrobatchLoader(
            source,
            processor=processor,
            seq_length=args.seq_length,
            token_ids={entry.name: processor.places(*entry.media) for entry in entries},
            packed=args.packing,
            row_lengths=row_lengths_of(args),
            parts=_parts(args),
        )
        return [next(loader) for _ in range(_count(args))]

    return of_replica


def step_of_size(args: Namespace, model: Any, *, visual_tokens: int) -> StepOf:
    """Microbatches with ``visual_tokens`` to a row, of an image of about a square, or a sound.

    They are the first encoder's, spread evenly over the row; others have no media.

    Raises:
        ValueError: there are more of them than a row has tokens.
    """
    rows, length = args.micro_batch_size, args.seq_length
    if not 0 <= visual_tokens < length:
        raise ValueError(
            f"--visual-tokens is {visual_tokens}: expected 0 or more, and less than "
            f"--seq-length {length}, for a row of one image and its text"
        )
    first, *others = (entry.name for entry in encoders(model.entries()))
    none = np.empty(0, dtype=np.int64)
    units = dict.fromkeys(others, Unit(places=(none,) * rows))
    units[first] = Unit(
        grids=(model.encoder(first).grid_of(visual_tokens),) * rows if visual_tokens else (),
        places=(np.arange(visual_tokens) * length // max(1, visual_tokens),) * rows,
    )
    parts = _parts(args)
    microbatch = Microbatch(
        input_ids=None,
        position_ids=torch.empty(3, rows, length // args.context_parallel_size, device="meta"),
        labels=None,
        loss_mask=None,
        tokens=rows * length,
        units=units,
        own=None if parts is None else parts.of(length),
    )
    step = [replace(microbatch, number=number) for number in range(_count(args))]
    return lambda replica: step


@dataclass(frozen=True, kw_only=True)
class OwnRanks:
    """An encoder on ranks of its own, seen at the replica that has the most samples.

    ``made`` are the samples of a microbatch of all decoder replicas that this ``replica`` encodes,
    decoder replica by decoder replica; of replicas that have equally many it is the first.
    """

    name: str
    layout: Layout
    replica: int
    made: tuple[ApartPiece, ...]

    @property
    def samples(self) -> int:
        """How many samples of a microbatch of all decoder replicas the replica makes."""
        return sum(len(each.samples) for each in self.made)

    def rank(self, stage: int) -> int:
        """The replica's first rank on a pipeline stage, in the world."""
        return self.layout.stage(stage)[self.replica][0]


def own_ranks_of(args: Namespace, model: Any) -> tuple[OwnRanks, ...]:
    """The ranks of each encoder that lies apart, in the entries' order, by checked ``args``."""
    found = []
    for entry in encoders(model.entries()):
        encoder = model.encoder(entry.name)
        mode = mode_of(args, encoder)
        if not mode.apart:
            continue
        tp = encoder.tensor_model_parallel_size or mode.encoder_tp
        placement = mode.place(decoder_layout_of(args), entry=entry, tp=tp)
        slot = placement.pieces(entry.name, micro_batch_size=args.micro_batch_size)
        layout = placement.entry(entry.name).layout
        replicas = [
            OwnRanks(
                name=entry.name,
                layout=layout,
                replica=replica,
                made=tuple(each for each in slot if each.replica == replica),
            )
            for replica in range(layout.dp)
        ]
        found.append(max(replicas, key=lambda each: each.samples))
    return tuple(found)


def pieces_of(one: OwnRanks, step_of: StepOf, *, encoder: Any, packed: bool) -> list[Microbatch]:
    """Microbatches that the busiest replica of an ``encoder`` apart encodes, in its order."""
    steps = {each: step_of(each) for each in {piece.decoder for piece in one.made}}
    found = []
    for number in range(len(next(iter(steps.values())))):
        for each in one.made:
            microbatch = steps[each.decoder][number]
            unit = microbatch.units[one.name]
            if not packed:
                unit = _of_samples(unit, each.samples, tokens=encoder.tokens)
            found.append(replace(microbatch, units={one.name: unit}))
    return found


def _of_samples(unit: Unit, samples: range, *, tokens: Callable[[Grid], int]) -> Unit:
    """What a unit has of some rows, whose media stand in the order of the text."""
    ends = np.cumsum([0, *map(len, unit.places)])  # of rows
    first, behind = ends[samples.start], ends[samples.stop]
    starts = np.cumsum([0, *map(tokens, unit.grids)])[:-1]  # of media
    return replace(
        unit,
        places=unit.places[samples.start : samples.stop],
        grids=tuple(
            grid for grid, at in zip(unit.grids, starts, strict=True) if first <= at < behind
        ),
    )


def media_rows(microbatch: Microbatch) -> int:
    """Patches and frames of all its media."""
    return sum(unit.rows for unit in microbatch.units.values())


def _count(args: Namespace) -> int:
    """Microbatches of a replica's step."""
    each = args.micro_batch_size * args.data_parallel_size
    return next(StepSizes.constant(args.global_batch_size).microbatches(each=each))


def _parts(args: Namespace) -> RowParts | None:
    """The first rank's: of its text only what is the whole row's is looked at."""
    cp = args.context_parallel_size
    return RowParts(cp=cp, rank=0, balance=args.cp_balance) if cp > 1 else None
