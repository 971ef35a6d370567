"""The microbatches of a replica's first step: their lengths and their media."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from loongplug.context.row_parts import RowParts
from loongplug.data.loader import collate
from loongplug.data.microbatch import Microbatch, Share
from loongplug.data.source import EncoderUnits, LocalSource, PlannedMicrobatch
from loongplug.data.step_sizes import StepSizes
from loongplug.data.units import token_ids
from loongplug.estimate.own_ranks import own_ranks_of
from loongplug.hetero.routes import Rows, sequence_shards, size
from loongplug.models.entries import encoders
from loongplug.training.apart import decoder_layout_of
from loongplug.training.datasets import DatasetProvider
from loongplug.training.provider import engine_of
from loongplug.training.step_rows import row_lengths_of

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """A microbatch's media for one encoder, by their grids, and their tokens in each of its rows.

    ``shards`` are which of those tokens are in each part of the sequence, where that is split over
    ranks.
    """

    grids: tuple[Grid, ...] = ()
    row_tokens: tuple[int, ...] = ()
    shards: tuple[Rows, ...] | None = None

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(self.row_tokens)

    @property
    def rows(self) -> int:
        """Of the encoder's input."""
        return sum(map(prod, self.grids))

    def share(self, shares: Sequence[Share], *, replica: int | None) -> "UnitSize":
        """What of it this ``replica`` of the encoder encodes; all where it encodes nothing."""
        for each in shares:
            if each.encoder_replica == replica and each.media is not None:
                assert each.rows is not None, "media have rows"
                grids = tuple(self.grids[number] for number in each.media)
                return UnitSize(grids=grids, row_tokens=(size(each.rows),))
        return self


@dataclass(frozen=True, kw_only=True)
class MicrobatchSize:
    """A microbatch's units by encoder, and the tokens of each of its rows with padding.

    ``segments`` are the lengths of the samples in a pack.
    """

    units: Mapping[str, UnitSize]
    row_length: int
    segments: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """Of all its media."""
        return sum(unit.rows for unit in self.units.values())


def microbatches_of(args: Namespace) -> int:
    """How many a replica has to a step."""
    each = args.micro_batch_size * args.data_parallel_size
    return next(StepSizes.constant(args.global_batch_size).microbatches(each=each))


def microbatches_of_data(args: Namespace, model: Any, *, step: int = 0) -> list[MicrobatchSize]:
    """Those of the data that the flags name, in a step of the first replica, counted from 0.

    Reads the text parts and the headers of media only.

    Raises:
        ValueError: the data do not fit the model, or a row cannot be used.
    """
    data = _Data(args, model, step=step)
    found = []
    for planned, microbatch in data.microbatches(0):
        units = {name: data.unit(planned, microbatch, name) for name in microbatch.units}
        segments, length = microbatch.segments, microbatch.split.length
        if segments is not None:
            segments = (*segments, length - microbatch.tokens)
        found.append(MicrobatchSize(units=units, row_length=length, segments=segments))
    return found


def own_units_of_data(
    args: Namespace, model: Any, *, step: int = 0
) -> dict[str, tuple[UnitSize, ...]]:
    """What the busiest replica of each encoder on ranks of its own encodes in a step, by encoder.

    A unit for each decoder replica that it encodes for, microbatch by microbatch, as
    :func:`microbatches_of_data` reads them.

    Raises:
        ValueError: as there.
    """
    own = own_ranks_of(args, model)
    if not own:
        return {}
    data = _Data(args, model, step=step)
    replicas = sorted({each.edge.decoder for one in own for each in one.made})
    steps = {replica: data.microbatches(replica) for replica in replicas}
    return {
        one.name: tuple(
            data.unit(
                *steps[each.edge.decoder][number],
                one.name,
                samples=None if args.packing else each.samples,
            )
            for number in range(microbatches_of(args))
            for each in one.made
        )
        for one in own
    }


class _Data:
    """A step of the data that the flags name, from the text parts and the headers of media."""

    def __init__(self, args: Namespace, model: Any, *, step: int) -> None:
        self._args, self._model, self._step = args, model, step
        self._provider = DatasetProvider(args, model, engine=engine_of(args, model))

    def unit(
        self,
        planned: PlannedMicrobatch,
        microbatch: Microbatch,
        encoder: str,
        *,
        samples: range | None = None,
    ) -> UnitSize:
        """Of some samples of a microbatch; None for all."""
        args, layout = self._args, decoder_layout_of(self._args)
        media, every = planned.units[encoder].media, microbatch.units[encoder].places
        places = every if samples is None else every[samples.start : samples.stop]
        grids = zip(media.grids, media.samples, strict=True)
        shards = None
        if layout.sequence_shards(sequence_parallel=args.sequence_parallel) > 1:
            tp = layout.tp if args.sequence_parallel else 1
            shards = sequence_shards(places, split=microbatch.split, tp=tp)
        return UnitSize(
            grids=tuple(grid for grid, sample in grids if samples is None or sample in samples),
            row_tokens=tuple(map(len, places)),
            shards=shards,
        )

    def microbatches(self, replica: int) -> list[tuple[PlannedMicrobatch, Microbatch]]:
        """Those of a decoder replica."""
        args, dataset = self._args, self._provider.train
        cp = args.context_parallel_size
        # The first rank's: of its text only what is the whole row's is looked at.
        parts = RowParts(cp=cp, rank=0, balance=args.cp_balance) if cp > 1 else None
        processor, entries = dataset.processor, encoders(self._model.entries())
        source = LocalSource(
            dataset,
            sizes=StepSizes.constant(args.global_batch_size),
            micro_batch_size=args.micro_batch_size,
            dp_rank=replica,
            dp_size=args.data_parallel_size,
            seed=args.seed,
            encoders={entry.name: EncoderUnits(kinds=entry.media, loads=()) for entry in entries},
            consumed_samples=self._step * args.global_batch_size,
            bad_samples=self._provider.bad_samples,
            look_ahead=args.packing_look_ahead if args.packing else None,
        )
        step, row_lengths = list(source.next_step()), row_lengths_of(args)
        texts = [planned.samples for planned in step]
        found = []
        for planned in step:
            length: int = args.seq_length
            if row_lengths is not None:
                together = texts if row_lengths.by_step else [planned.samples]
                length = row_lengths.of(together, longest=length)
            (microbatch,) = collate(
                planned.samples,
                pad_token_id=processor.pad_token_id,
                seq_length=length,
                token_ids={entry.name: token_ids(processor, entry.media) for entry in entries},
                packed=args.packing,
                parts=parts,
            )
            found.append((planned, microbatch))
        return found


def microbatches_of_size(
    args: Namespace, model: Any, *, visual_tokens: int
) -> list[MicrobatchSize]:
    """As many of ``visual_tokens`` to each row, in one image of about a square, or one sound.

    They are the first encoder's; others have no media.

    Raises:
        ValueError: there are more of them than a row has tokens.
    """
    if not 0 <= visual_tokens < args.seq_length:
        raise ValueError(
            f"--visual-tokens is {visual_tokens}: expected 0 or more, and less than "
            f"--seq-length {args.seq_length}, for a row of one image and its text"
        )
    first, *others = (entry.name for entry in encoders(model.entries()))
    units = {first: _images(args, model, first, visual_tokens, args.micro_batch_size)}
    units |= {name: _images(args, model, name, 0, args.micro_batch_size) for name in others}
    return [MicrobatchSize(units=units, row_length=args.seq_length)] * microbatches_of(args)


def own_units_of_size(
    args: Namespace, model: Any, *, visual_tokens: int
) -> dict[str, tuple[UnitSize, ...]]:
    """As :func:`own_units_of_data`, of samples as :func:`microbatches_of_size` has them."""
    first = encoders(model.entries())[0].name
    return {
        one.name: tuple(
            _images(args, model, one.name, visual_tokens * (one.name == first), len(each.samples))
            for each in one.made
        )
        * microbatches_of(args)
        for one in own_ranks_of(args, model)
    }


def _images(args: Namespace, model: Any, encoder: str, tokens: int, samples: int) -> UnitSize:
    """A unit with one of so many ``tokens`` in each sample; 0 for none. Parts have equally many."""
    parts = decoder_layout_of(args).sequence_shards(sequence_parallel=args.sequence_parallel)
    whole = tokens * samples
    ends = [min(whole, part * -(-whole // parts)) for part in range(parts + 1)]
    shards = tuple((slice(*each),) for each in pairwise(ends))
    return UnitSize(
        grids=(model.encoder(encoder).grid_of(tokens),) * samples if tokens else (),
        row_tokens=(tokens,) * samples,
        shards=shards if parts > 1 else None,
    )
