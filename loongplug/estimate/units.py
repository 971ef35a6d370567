"""The microbatches of a replica's first step: their lengths, their images, who encodes which."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from loongplug.data.loader import collate
from loongplug.data.source import Assignment, LocalSource
from loongplug.data.step_sizes import StepSizes
from loongplug.hetero.modes import balance_of
from loongplug.hetero.routes import sequence_shards, size
from loongplug.training.datasets import DatasetProvider
from loongplug.training.provider import engine_of

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """A microbatch's images and videos as patch grids.

    ``shards`` are its visual tokens in each part of the sequence, where that is split over ranks.
    ``segments`` are the lengths of the samples in a pack.
    """

    grids: tuple[Grid, ...]
    shards: tuple[int, ...] | None = None
    segments: tuple[int, ...] | None = None

    @property
    def patches(self) -> int:
        """Of all its images and videos."""
        return sum(time * height * width for time, height, width in self.grids)


def microbatches_of(args: Namespace) -> int:
    """How many a replica has to a step."""
    each = args.micro_batch_size * args.data_parallel_size
    return next(StepSizes.constant(args.global_batch_size).microbatches(each=each))


def units_of_data(args: Namespace, model: Any, *, step: int = 0) -> list[UnitSize]:
    """Those of the data that the flags name, in a step of the first replica, counted from 0.

    Reads the text parts and the headers of media only.

    Raises:
        ValueError: the data do not fit the model, or a row cannot be used.
    """
    provider = DatasetProvider(args, model, engine=engine_of(args, model))
    dataset, processor = provider.train, provider.train.processor
    source = LocalSource(
        dataset,
        sizes=StepSizes.constant(args.global_batch_size),
        micro_batch_size=args.micro_batch_size,
        dp_rank=0,
        dp_size=args.data_parallel_size,
        seed=args.seed,
        loads=(),
        consumed_samples=step * args.global_batch_size,
        bad_samples=provider.bad_samples,
        look_ahead=args.packing_look_ahead if args.packing else None,
    )
    found = []
    tp = args.tensor_model_parallel_size if args.sequence_parallel else None
    for planned in source.next_step():
        (microbatch,) = collate(
            planned.samples,
            pad_token_id=processor.pad_token_id,
            seq_length=args.seq_length,
            visual_token_ids=processor.visual_token_ids,
            packed=args.packing,
        )
        shards = None
        if tp is not None:
            parts = sequence_shards(microbatch.visual_places, length=args.seq_length, parts=tp)
            shards = tuple(size(rows) for rows in parts)
        segments = microbatch.segments
        if segments is not None:
            segments = (*segments, args.seq_length - microbatch.tokens)
        found.append(UnitSize(grids=planned.media.grids, shards=shards, segments=segments))
    return found


def units_of_size(args: Namespace, model: Any, *, visual_tokens: int) -> list[UnitSize]:
    """As many of ``visual_tokens`` to each row, in one image of about a square.

    Raises:
        ValueError: there are more of them than a row has tokens.
    """
    if not 0 <= visual_tokens < args.seq_length:
        raise ValueError(
            f"--visual-tokens is {visual_tokens}: expected 0 or more, and less than "
            f"--seq-length {args.seq_length}, for a row of one image and its text"
        )
    merge = model.vision.spatial_merge_size
    height = next(
        (side for side in range(isqrt(visual_tokens), 0, -1) if visual_tokens % side == 0), 0
    )
    grids: tuple[Grid, ...] = ()
    if height:
        grids = ((1, height * merge, visual_tokens // height * merge),) * args.micro_batch_size
    shards = None
    if args.sequence_parallel:
        tp = args.tensor_model_parallel_size
        shards = (-(-visual_tokens * args.micro_batch_size // tp),) * tp
    return [UnitSize(grids=grids, shards=shards)] * microbatches_of(args)


def encoder_replicas_of(
    units: Sequence[UnitSize], args: Namespace, model: Any, *, replicas: int
) -> tuple[int, ...]:
    """Which of the encoder's ``replicas`` encodes each, as the run assigns them."""
    balance = balance_of(args, model.vision)
    by_cost = None if balance is None else balance.assign
    assigned = Assignment(replicas=replicas, by_cost=by_cost)
    return tuple(assigned.of(range(len(units)), [unit.grids for unit in units]))
