"""From the flags of a run to its checked arguments and the microbatches of its first step."""

import json
import logging
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loongplug.context.row_parts import RowParts
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch, Unit
from loongplug.data.planned_media import EncoderUnits
from loongplug.data.sample_order import StepSizes
from loongplug.data.source import LocalSource
from loongplug.hetero.modes import mode_of
from loongplug.hetero.placement import ApartPiece
from loongplug.models.entries import encoders
from loongplug.models.family import Family
from loongplug.parallel.layout import Layout
from loongplug.platform import requested_device
from loongplug.training.arguments import ParsedArguments
from loongplug.training.config import compose_asked_for
from loongplug.training.datasets import DatasetProvider
from loongplug.training.defaults import default_tokenizer
from loongplug.training.flags import read_command_line, without_flags
from loongplug.training.provider import engine_of
from loongplug.training.rank_data import row_lengths_of
from loongplug.training.rules.rule import decoder_layout_of
from loongplug.training.special_tokens import FILE
from loongplug.verify.plan import first_rank

# What the machine of the run has and this one may not; none of it changes what is counted.
_OF_THE_MACHINE = frozenset(
    ("device", "transformer_impl", "distributed_backend", "moe_permute_fusion")
)

# By decoder replica, which samples of each of its microbatches; None for all.
Parts = Mapping[int, range | None]
# What a rank that takes such parts has of a step, in its order.
StepOf = Callable[[Parts], Sequence[Microbatch]]


def run_of(
    flags: Sequence[str], *, ranks: int, visual_tokens: int | None, folder: Path
) -> tuple[ParsedArguments, StepOf]:
    """The checked arguments of a run, and the microbatches of its first step.

    ``visual_tokens`` of each sample stand in for the images of the data; the flags need name
    neither data nor tokenizer then, for which there will be others in ``folder``. Raises ValueError
    where the flags or ``visual_tokens`` cannot be used.
    """
    with quiet():
        stand_ins = None if visual_tokens is None else folder
        parsed = parsed_for(flags, ranks=ranks, stand_ins=stand_ins)
        args, model = parsed.args, parsed.model
        if visual_tokens is None:
            return parsed, step_of_data(args, model)
        return parsed, step_of_size(args, model, visual_tokens=visual_tokens)


def parsed_for(
    flags: Sequence[str], *, ranks: int, stand_ins: Path | None = None
) -> ParsedArguments:
    """The checked arguments of the first rank, for tensors that are on no device.

    The run is for GPUs, unless ``--device cpu`` is among the flags. In the folder ``stand_ins``
    there will be a tokenizer and an empty file of data for flags that name none. Raises ValueError
    where the flags cannot be used, or name too little.
    """
    line = read_command_line(flags)  # refuses what is no flag before it is taken apart
    args = line.args
    default_tokenizer(args)
    sizes = {
        "tokenizer-model": args.tokenizer_model,
        "train-data-path": args.train_data_path or args.data_path,
    }
    for flag in (name for name, value in sizes.items() if not value):
        if stand_ins is None:
            raise ValueError(
                f"--{flag} is not given: expected a tokenizer and data, whose rows say how large "
                "microbatches are, or in their place --visual-tokens N, of each sample"
            )
        path = stand_ins
        if flag == "tokenizer-model":
            composed = compose_asked_for(args, overrides=line.overrides)
            _write_tokenizer(path, composed.config, family=composed.family)
        else:
            path = path / "rows.jsonl"
            path.touch()  # a run's start looks whether it is there, an estimate reads nothing of it
        flags = [*flags, f"--{flag}", str(path)]
    target = "cpu" if requested_device(flags) == "cpu" else "cuda"
    flags = [*without_flags(flags, _OF_THE_MACHINE), "--device", "cpu"]
    return first_rank(flags, ranks=ranks, target=target)


def _write_tokenizer(folder: Path, model: Any, *, family: Family) -> None:
    """Write a tokenizer that has the model's special tokens and no others."""
    known = {text: getattr(model, field) for field, text in family.special_tokens.items()}
    free = (number for number in count() if number not in known.values())
    ids = {text: next(free) if number is None else number for text, number in known.items()}
    tokens = [{"content": text, "id": number} for text, number in ids.items()]
    content = {"added_tokens": tokens, "model": {"vocab": {}}}
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Megatron says of models that it builds."""
    logger = logging.getLogger("megatron")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(before)


def step_of_data(args: Namespace, model: Any, *, step: int = 0) -> StepOf:
    """Microbatches of the data that the flags name, in a step that is counted from 0.

    Reads the text parts and the headers of media only. Raises ValueError where the data do not fit
    the model, or a row cannot be used.
    """
    provider = DatasetProvider(args, model, engine=engine_of(args, model))
    dataset, entries = provider.train, encoders(model.entries())
    processor = dataset.processor

    def of(parts: Parts) -> list[Microbatch]:
        source = LocalSource(
            dataset,
            sizes=StepSizes.constant(args.global_batch_size),
            micro_batch_size=args.micro_batch_size,
            parts=parts,
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
            parts=_row_parts(args),
        )
        return [next(loader) for _ in range(_count(args) * len(parts))]

    return of


def step_of_size(args: Namespace, model: Any, *, visual_tokens: int) -> StepOf:
    """Microbatches with ``visual_tokens`` to a row, of an image of about a square, or a sound.

    They are the first encoder's, spread evenly over the row; others have no media. Raises
    ValueError where there are more of them than a row has tokens.
    """
    length = args.seq_length
    if not 0 <= visual_tokens < length:
        raise ValueError(
            f"--visual-tokens is {visual_tokens}: expected 0 or more, and less than "
            f"--seq-length {length}, for a row of one image and its text"
        )
    first, *others = (entry.name for entry in encoders(model.entries()))
    image = (model.encoder(first).grid_of(visual_tokens),) if visual_tokens else ()
    places = np.arange(visual_tokens) * length // max(1, visual_tokens)
    parts = _row_parts(args)

    def microbatch(number: int, rows: int) -> Microbatch:
        units = dict.fromkeys(others, Unit(places=(places[:0],) * rows))
        units[first] = Unit(grids=image * rows, places=(places,) * rows)
        held = length // args.context_parallel_size
        return Microbatch(
            input_ids=None,
            position_ids=torch.empty(3, rows, held, device="meta"),
            labels=None,
            loss_mask=None,
            tokens=rows * length,
            units=units,
            own=None if parts is None else parts.of(length),
            number=number,
        )

    def of(taken: Parts) -> list[Microbatch]:
        rows = [args.micro_batch_size if each is None else len(each) for each in taken.values()]
        return [microbatch(number, each) for number in range(_count(args)) for each in rows]

    return of


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
        return sum(len(each.samples) for each in self.made)

    def rank(self, stage: int) -> int:
        """The replica's first rank on a pipeline stage, in the world."""
        return self.layout.stage(stage)[self.replica][0]

    def parts(self, *, packed: bool) -> Parts:
        """The parts of microbatches that the replica encodes; a pack is whole."""
        return {each.decoder: None if packed else each.samples for each in self.made}


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
        of_replica = [tuple(x for x in slot if x.replica == each) for each in range(layout.dp)]
        replicas = (
            OwnRanks(name=entry.name, layout=layout, replica=number, made=made)
            for number, made in enumerate(of_replica)
        )
        found.append(max(replicas, key=lambda each: each.samples))
    return tuple(found)


def media_rows(microbatch: Microbatch) -> int:
    """Patches and frames of all its media."""
    return sum(unit.rows for unit in microbatch.units.values())


def _count(args: Namespace) -> int:
    each = args.micro_batch_size * args.data_parallel_size
    return next(StepSizes.constant(args.global_batch_size).microbatches(each=each))


def _row_parts(args: Namespace) -> RowParts | None:
    """The first rank's: of its text only what is the whole row's is looked at."""
    cp = args.context_parallel_size
    return RowParts(cp=cp, rank=0, balance=args.cp_balance) if cp > 1 else None
