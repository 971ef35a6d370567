"""The plan of a step: what one rank's encoder side does, and when. Pure; no tensor is here.

A plan is read by whoever needs it: the executor does its operations, the estimate adds up their
bytes. What an operation means is told here and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


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


def forward(microbatch: int) -> When:
    """Before its forward."""
    return When(Event.FORWARD, microbatch)


def backward(microbatch: int) -> When:
    """Before its backward."""
    return When(Event.BACKWARD, microbatch)


def gradient(microbatch: int) -> When:
    """When the gradient of its features is there."""
    return When(Event.GRADIENT, microbatch)


class Kept(Enum):
    """What can be on the host while the decoder works."""

    FEATURES = "features"
    GRADIENTS = "gradients of features"
    ACTIVATIONS = "what the encoder's backward needs"
    STATE = "the encoder's parameters, gradients and optimizer state"


@dataclass(frozen=True, kw_only=True)
class _OfUnit:
    unit: int


class EncodeInForward(_OfUnit):
    """The decoder's own forward encodes the unit, in its graph."""


@dataclass(frozen=True, kw_only=True)
class Encode:
    """Make a unit's features here. ``unit`` None: of no media, so that parameters get gradients.

    With ``movable``, what its backward needs can leave for the host. The units ``joined`` to it are
    made in the same pass through the encoder.
    """

    unit: int | None
    movable: bool = False
    joined: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GatherFeatures:
    """These units' features go from the ranks that made them to their consumers.

    Collective: the exchange's group. With ``to_host`` consumers have them on the host alone.
    """

    units: range
    to_host: bool = False


class TakeFeatures(_OfUnit):
    """The decoder's forward uses the unit's features up."""


class KeepGradient(_OfUnit):
    """The gradient of the unit's features, which the decoder has just made, waits."""


@dataclass(frozen=True, kw_only=True)
class ScatterGradients:
    """The gradients of these units' features go back to the ranks that encoded them.

    Collective: the exchange's group.
    """

    units: range


class TakeStates(_OfUnit):
    """What the encoder's stage before has made of the unit is there, in the place of its media."""


class HandOn(_OfUnit):
    """What this stage of the encoder has made of the unit goes to the next one."""


class TakeBack(_OfUnit):
    """The gradient of what was handed on is there."""


class GiveBack(_OfUnit):
    """The gradient of what was taken goes to the stage before."""


@dataclass(frozen=True, kw_only=True)
class EncoderBackward:
    """The unit's gradient goes through the encoder; with ``more`` to come it is not reduced yet.

    With it go those of the units that were ``joined`` to it.
    """

    unit: int | None
    more: bool
    joined: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EncodePieces:
    """Make these pieces' features here, in one pass; pieces are numbered over all of the step.

    With ``movable``, what its backward needs can leave for the host, by the name of the first.
    """

    pieces: tuple[int, ...]
    movable: bool = False


@dataclass(frozen=True, kw_only=True)
class SendFeatures:
    """A piece's features set out for their consumers. Nobody waits for that."""

    piece: int


@dataclass(frozen=True, kw_only=True)
class ReceiveFeatures(_OfUnit):
    """The features of these pieces, which are all of the unit's, are here."""

    pieces: range


@dataclass(frozen=True, kw_only=True)
class SendGradients(_OfUnit):
    """The gradient of the unit's features sets out, piece by piece, for who encoded them."""

    pieces: range


@dataclass(frozen=True, kw_only=True)
class ReceiveGradient:
    """The gradient of a piece's features is here."""

    piece: int


@dataclass(frozen=True, kw_only=True)
class PiecesBackward:
    """The gradients of pieces that were made in one pass go through the encoder, in one, too.

    :class:`ReduceGradients` comes behind all.
    """

    pieces: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GatherWeights:
    """The encoder's weights are whole on this rank, where an optimizer has left parts of them.

    Collective: the encoder's data parallel group. Replicas that work at times of their own cannot
    gather them in the forward.
    """


@dataclass(frozen=True, kw_only=True)
class ReduceGradients:
    """The reduction of the encoder's gradients sets out. Collective as :class:`GatherWeights`."""


@dataclass(frozen=True, kw_only=True)
class _Move:
    """``units``: of which units; empty for the encoder's state, which is of none.

    In a step that streams they are pieces, of which each stands for all of its pass.
    """

    what: Kept
    units: tuple[int, ...] = ()


class Offload(_Move):
    """Copies to the host set out; the device's memory is not free before :class:`Release`."""


class Release(_Move):
    """The copies to the host are done; the device's memory is free."""


class Reload(_Move):
    """Memory is taken on the device, and copies back set out."""


class Await(_Move):
    """What was sent for may be used from here on."""


Operation = (
    EncodeInForward
    | Encode
    | GatherFeatures
    | TakeFeatures
    | KeepGradient
    | ScatterGradients
    | TakeStates
    | HandOn
    | TakeBack
    | GiveBack
    | EncoderBackward
    | EncodePieces
    | SendFeatures
    | ReceiveFeatures
    | SendGradients
    | ReceiveGradient
    | PiecesBackward
    | GatherWeights
    | ReduceGradients
    | Offload
    | Release
    | Reload
    | Await
)
StepPlan = Mapping[When, tuple[Operation, ...]]
