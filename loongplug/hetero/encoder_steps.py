"""What a policy is asked of a step. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from loongplug.hetero.balance import in_passes
from loongplug.hetero.operations import Kept


class EncoderWork[Piece](NamedTuple):
    """A pass through the encoder, forward or backward, before one of its stage's passes.

    ``before`` counts all passes of the stage, forward and backward, from 0 on; as many as there
    are stands for behind the last. What earlier passes made has been sent then, and what the next
    one takes is not waited for yet. ``pieces`` go together, forward and backward, in order:
    features are there when all of them are made, and the backward waits for the gradients of all.
    """

    before: int
    forward: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Pieces that are encoded between the decoder's passes.

    ``work`` is what this rank does with those that it has, in its order, before passes of its own
    stage. ``pieces`` are the numbers of each microbatch's, of all of the step.
    """

    work: tuple[EncoderWork[int], ...]
    pieces: tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class EncoderStep:
    """What a policy knows of one step on one rank.

    ``encoder_replicas`` has, for each microbatch of the step, which of the ``replicas`` encode
    shares of its unit; ``replica`` is the one that this rank is of, None for none, and what it has
    to do with a unit it does with its share. ``consumes``: the rank's
    decoder takes features. ``trains``: the encoder or what goes with it has gradients in this step,
    which is one of ``training``. ``last_stage``: of the decoder's pipeline. ``on_host``: what is
    there while the decoder works. ``rows`` are those of the encoder's input that this rank
    has of each unit; neighbours that have ``joined_rows`` at most go through it in one pass, where
    the policy has them do so. Without ``rows`` each goes by itself.

    Where the encoder lies on ranks of its own, its units are pieces: what it makes of one decoder
    replica's microbatch. ``pieces`` are how many it makes at a time, ``forwards`` how many times it
    has done so before it takes each gradient (:func:`~.recorded_schedule.forwards_first`).
    This is ``stage`` of its ``stages``; ``trains`` is whether anything has gradients in it or
    before it, ``trains_before`` whether anything has before it.

    ``stream`` is what a policy that fills the pipeline's bubbles fills them with, None where units
    are encoded whole.
    """

    encoder_replicas: tuple[tuple[int, ...], ...]
    replicas: int
    replica: int | None
    consumes: bool
    training: bool
    trains: bool
    last_stage: bool
    on_host: frozenset[Kept] = frozenset()
    rows: tuple[int, ...] = ()
    joined_rows: int = 0
    pieces: int = 1
    forwards: tuple[int, ...] = ()
    stage: int = 0
    stages: int = 1
    trains_before: bool = False
    stream: Stream | None = None

    @property
    def units(self) -> range:
        """The numbers of the step's units, a unit to a microbatch."""
        return range(len(self.encoder_replicas))

    def mine(self, units: range) -> list[int]:
        """The ``units`` of which this rank encodes a share."""
        return [unit for unit in units if self.replica in self.encoder_replicas[unit]]

    def passes(self) -> list[tuple[int, ...]]:
        """The units that this rank encodes, by the pass that they go in."""
        mine = self.mine(self.units)
        rows = [self.rows[unit] for unit in mine] if self.rows else ()
        return in_passes(mine, rows, most=self.joined_rows if self.rows else None)
