"""One step of full separation: the decoder's passes, the encoder's work, and what they cost. Pure.

Costs are integers of one unit, such as counted operations.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from loongplug.hetero.encoder_steps import EncoderWork
from loongplug.hetero.recorded_schedule import Pipeline, turns


class DecoderPass(NamedTuple):
    """A microbatch's way through one stage or virtual chunk of the decoder.

    ``place`` is where it stands on the microbatch's whole way forward, from 0 on: with several
    chunks to a rank, chunk x stages + stage.
    """

    forward: bool
    place: int
    microbatch: int


def decoder_passes(pipeline: Pipeline, microbatches: int) -> tuple[DecoderPass, ...]:
    """The passes of one stage in a step, in Megatron's order."""
    return tuple(
        DecoderPass(forward, one.chunk * pipeline.stages + pipeline.stage, one.microbatch)
        for turn in turns(pipeline, microbatches)
        for forward, one in ((True, turn.forward), (False, turn.backward))
        if one is not None
    )


class PieceCost(NamedTuple):
    """What one encoder replica takes for a piece; the backward of a frozen encoder takes 0."""

    forward: int
    backward: int


FREE = PieceCost(0, 0)


Name = tuple[int, int]  # of a piece: its microbatch, and its number in it


# What each encoder replica of a model replica does in a step, in its order.
EncoderPlan = tuple[tuple[EncoderWork[Name], ...], ...]


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """What holds for every pass through the encoder.

    ``trains``: it has a backward. ``each`` is what a pass takes besides its pieces, however many
    these are; pieces go together as long as their forwards take no more than ``joined``.
    """

    trains: bool = True
    each: PieceCost = FREE
    joined: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a model replica, by costs.

    Args:
        pieces: of each microbatch, in the order of its rows; none for one without media.
        replicas: the stage that each encoder replica lies on; each stage has at least one. One
            that is spread over several stages has no place here.
        forward: what a microbatch's forward takes, by place.
        backward: the same of its backward.
        group: how many microbatches each of a rank's chunks takes in turn, where it has several.
        encoder: what holds for its passes.
    """

    pieces: tuple[tuple[PieceCost, ...], ...]
    replicas: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    group: int
    encoder: PassCosts = PassCosts()

    def __post_init__(self) -> None:
        stages = 1 + max(self.replicas)
        assert {*self.replicas} == {*range(stages)}, f"{self.replicas} on {stages} stages"
        assert len(self.forward) == len(self.backward)
        assert len(self.forward) % stages == 0, f"{len(self.forward)} places on {stages} stages"

    @cached_property
    def passes(self) -> tuple[tuple[DecoderPass, ...], ...]:
        """The passes of each stage, in Megatron's order."""
        stages = 1 + max(self.replicas)
        first = Pipeline(
            stages=stages, stage=0, chunks=len(self.forward) // stages, group=self.group
        )
        return tuple(
            decoder_passes(replace(first, stage=stage), len(self.pieces)) for stage in range(stages)
        )

    def cost(self, one: DecoderPass) -> int:
        """The cost of a decoder's pass."""
        return (self.forward if one.forward else self.backward)[one.place]

    def before(self, one: DecoderPass) -> DecoderPass | None:
        """The pass that this one waits for, beside features; None for the first of all."""
        forward, place, microbatch = one
        if forward:
            return DecoderPass(True, place - 1, microbatch) if place else None
        if place == len(self.forward) - 1:
            return DecoderPass(True, place, microbatch)
        return DecoderPass(False, place + 1, microbatch)

    @cached_property
    def behind(self) -> dict[DecoderPass | None, DecoderPass]:
        """The pass that waits for each, beside an encoder's backward."""
        return {self.before(one): one for passes in self.passes for one in passes}

    def encoding(self, microbatch: int, piece: int) -> int:
        """What a piece takes forward and, where the encoder trains, backward."""
        cost = self.pieces[microbatch][piece]
        return cost.forward + cost.backward if self.encoder.trains else cost.forward

    def encoder_pass(self, names: Iterable[Name], *, forward: bool) -> int:
        """What a pass of these pieces takes."""
        way = 0 if forward else 1
        return self.encoder.each[way] + sum(self.pieces[unit][piece][way] for unit, piece in names)

    @cached_property
    def names(self) -> tuple[Name, ...]:
        """All pieces in order, by microbatch and place in it."""
        return tuple(
            (microbatch, piece)
            for microbatch, pieces in enumerate(self.pieces)
            for piece in range(len(pieces))
        )

    @cached_property
    def decoding(self) -> tuple[int, ...]:
        """What the decoder takes on each stage."""
        return tuple(sum(map(self.cost, passes)) for passes in self.passes)

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The replicas on each stage."""
        return tuple(
            tuple(number for number, at in enumerate(self.replicas) if at == stage)
            for stage in range(len(self.passes))
        )
