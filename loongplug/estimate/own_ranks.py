"""Encoders on ranks of their own: which of their ranks an estimate looks at. Pure."""

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from typing import Any

from loongplug.hetero.modes import mode_of
from loongplug.hetero.placement import ApartPiece
from loongplug.models.entries import encoders
from loongplug.parallel.layout import Layout
from loongplug.training.apart import decoder_layout_of


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
        """Of a microbatch of all decoder replicas, those of ``made``."""
        return sum(len(each.samples) for each in self.made)

    def rank(self, stage: int) -> int:
        """The replica's first rank on a pipeline stage, in the world."""
        return self.layout.stage(stage)[self.replica][0]


def own_ranks_of(args: Namespace, model: Any) -> tuple[OwnRanks, ...]:
    """Of each encoder that lies apart, in the order of the model's entries, by checked ``args``."""
    found = []
    for entry in encoders(model.entries()):
        encoder = model.encoder(entry.name)
        mode = mode_of(args, encoder)
        if not mode.apart:
            continue
        decoder = decoder_layout_of(args)
        tp = encoder.tensor_model_parallel_size or mode.encoder_tp
        placement = mode.place(decoder, entry=entry, tp=tp)
        slot = placement.pieces(entry.name, micro_batch_size=args.micro_batch_size)
        samples: Counter[int] = Counter()
        for each in slot:
            samples[each.replica] += len(each.samples)
        ((replica, _),) = samples.most_common(1)  # of equal ones that which came first
        found.append(
            OwnRanks(
                name=entry.name,
                layout=placement.entry(entry.name).layout,
                replica=replica,
                made=tuple(each for each in slot if each.replica == replica),
            )
        )
    return tuple(found)
