"""The plan of a step: what one rank's encoder side does, when, and what a policy makes it of. Pure.

What goes through an encoder at once are *pieces*: a microbatch's media, or some of them, or those
of several microbatches. They are numbered over the step, in the order of microbatches and within
each. Where media are not cut, piece n is what there is of microbatch n; several replicas may then
have shares of it. A rank of an encoder apart numbers what it makes itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from loongplug.hetero.balance import in_passes


class Event(Enum):
    """Moments of a step, by microbatch but for the first, the last, and those between passes.

    Of the rank's first chunk, whose forwards and backwards both come in the order of microbatches.
    """

    BEGIN = "begin"  # before Megatron's schedule
    PASS = "pass"  # before a pass of the stage, of any chunk; its input may come meanwhile
    FORWARD = "forward"  # before a microbatch's forward
    BACKWARD = "backward"  # before a microbatch's backward
    GRADIENT = "gradient"  # within it, when the gradient of the features is there
    END = "end"  # behind the schedule; gradients are finalised after that


@dataclass(frozen=True)
class When:
    """An event, and of which microbatch it is; or before which ``number`` of the stage's passes."""

    event: Event
    microbatch: int | None = None
    number: int | None = None


BEGIN, END = When(Event.BEGIN), When(Event.END)


def before_pass(number: int) -> When:
    """Before a pass of the stage, forward or backward, from 0 on; their count is behind the last.

    What the pass before has made has set out, and nobody waits for what this one takes yet.
    """
    return When(Event.PASS, number=number)


# Of a microbatch.
forward = partial(When, Event.FORWARD)
backward = partial(When, Event.BACKWARD)
gradient = partial(When, Event.GRADIENT)


class Cargo(Enum):
    """Rows of pieces that go from one rank to another, and how a trace calls them."""

    FEATURES = "features", "sends"
    GRADIENTS = "gradients", "sends"  # of features
    STATES = "states", "sends of states between stages"  # of a stage, for the next
    STATE_GRADIENTS = "gradients", "sends of gradients between stages"

    def __init__(self, said: str, waits: str) -> None:
        """``waits``: the wait for what is sent."""
        self.said, self.waits = said, waits

    @property
    def back(self) -> bool:
        """Whether they come back from where others went."""
        return self in (Cargo.GRADIENTS, Cargo.STATE_GRADIENTS)


class Kept(Enum):
    """What can be on the host while the decoder works."""

    FEATURES = "features"
    GRADIENTS = "gradients of features"
    ACTIVATIONS = "what the encoder's backward needs"
    STATE = "the encoder's parameters, gradients and optimizer state"


class To(Enum):
    """What becomes of something that can be on the host."""

    LEAVE = "leave"  # copies to the host set out; the device's memory is not free yet
    FREE = "free"  # these copies are done; the device's memory is free
    RETURN = "return"  # memory is taken on the device, and copies back set out
    HERE = "here"  # it may be used from here on


@dataclass(frozen=True, kw_only=True)
class Encode:
    """The features of these pieces are made here, in one pass, or the states of this stage.

    Without ``pieces``, of no media, so that parameters get gradients. With ``movable``, what the
    backward needs can leave for the host, by the number of the first piece.
    """

    pieces: tuple[int, ...]
    movable: bool = False


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The gradients of pieces that were made in one pass go through the encoder, in one, too.

    Where one rank of a replica has received them, it shares them first. With ``more`` to come they
    are not reduced yet. Collective: the replica.
    """

    pieces: tuple[int, ...]
    more: bool


@dataclass(frozen=True, kw_only=True)
class Send:
    """A piece's rows set out for the ranks that take them. Nobody waits for that."""

    what: Cargo
    piece: int


@dataclass(frozen=True, kw_only=True)
class Receive:
    """What this rank takes of a piece is here; none where another one of its group takes it."""

    what: Cargo
    piece: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """These pieces' features go to their consumers, or gradients back, of all ranks at once.

    Collective: the exchange's group. With ``to_host`` consumers have them on the host alone.
    """

    what: Cargo
    pieces: range
    to_host: bool = False


@dataclass(frozen=True, kw_only=True)
class Hand:
    """The decoder's forward uses a microbatch's features up, or has just made their gradient.

    Where pieces are sent, ranks of its first stage deal them then, by the ``Dealer`` of
    :mod:`~.piece_carrier`. Collective: their group.
    """

    what: Cargo
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """``pieces``: of which ones, each for its pass; empty for the encoder's state, of none."""

    to: To
    what: Kept
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The encoder's weights become whole on this rank, or the reduction of gradients sets out.

    Collective: the encoder's data parallel group. For replicas that work at times of their own:
    they cannot gather in a forward, and they reduce together when all are through.
    """

    gather: bool


Operation = Encode | Backward | Send | Receive | Exchange | Hand | Move | Weights
StepPlan = Mapping[When, tuple[Operation, ...]]


class EncoderWork[Piece](NamedTuple):
    """A pass through the encoder, forward or backward, before a pass as in :func:`before_pass`.

    ``pieces`` go together, forward and backward, in order: features are there when all of them are
    made, and the backward waits for the gradients of all.
    """

    before: int
    forward: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The ``pieces`` of each microbatch, by their numbers, and this rank's ``work`` in order."""

    work: tuple[EncoderWork[int], ...]
    pieces: tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class EncoderStep:
    """What a policy knows of one step on one rank.

    ``encoder_replicas`` has, for each microbatch of the step, which of the ``replicas`` encode
    shares of its unit; ``replica`` is the one that this rank is of, None for none. ``consumes``:
    the rank's decoder takes features. ``trains``: the encoder or what goes with it has gradients in
    this step, which is one of ``training``. ``last_stage``: of the decoder's pipeline. ``on_host``:
    what is there while the decoder works. ``rows`` are those of the encoder's input that this rank
    has of each unit; neighbours that have ``joined_rows`` at most may go through it in one pass.

    ``stream`` is what the pipeline's bubbles are filled with, None where units are encoded whole.

    Where the encoder lies on ranks of its own, its units are pieces: what it makes of one decoder
    replica's microbatch. ``pieces`` are how many it makes at a time, ``forwards`` how many times it
    has done so before it takes each gradient (:func:`~.recorded_schedule.forwards_first`). This is
    ``stage`` of its ``stages``; ``trains_before``: anything has gradients before it.
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
        return [unit for unit in units if self.replica in self.encoder_replicas[unit]]

    def passes(self) -> list[tuple[int, ...]]:
        """The units that this rank encodes, by the pass that they go in."""
        mine = self.mine(self.units)
        rows = [self.rows[unit] for unit in mine] if self.rows else ()
        return in_passes(mine, rows, most=self.joined_rows if self.rows else None)
