"""What pieces have in memory for the encoder, where it works between the decoder's passes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loongplug.estimate.encoded_units import EncodedUnits
from loongplug.estimate.ledger import ENCODER, FEATURE_GRADIENTS, FEATURES, INPUT, Ledger
from loongplug.estimate.units import UnitSize, parts_of
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    Event,
    Hand,
    Move,
    Operation,
    Receive,
    Send,
    StepPlan,
    To,
    When,
)
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import common, size
from loongplug.hetero.streamed_pieces import Piece
from loongplug.hetero.wire import WINDOW


def consumed_tokens(
    pieces: Sequence[Piece], units: Sequence[UnitSize], *, edge: Edge, rank: int
) -> list[int]:
    """How many of each piece's features the decoder of ``rank`` takes; ``units`` by microbatch."""
    if rank not in edge.consumers:
        return [0] * len(pieces)
    part = edge.part_of(rank, parts=parts_of(units))

    def of_piece(piece: Piece) -> int:
        shards = units[piece.microbatch].shards
        return piece.tokens if shards is None else size(common(shards[part], (piece.rows,)))

    return [of_piece(each) for each in pieces]


@dataclass(kw_only=True)
class StreamedSide:
    """What a step that streams has in memory for an encoder of one rank.

    ``encoded`` has the ``pieces`` in the place of units. ``consumed`` are, by piece, the bytes that
    this rank's decoder takes of it, 0 for all where it takes none. ``media`` are the bytes of what
    is loaded here.
    """

    plan: StepPlan
    pieces: Sequence[Piece]
    replica: int
    consumed: Sequence[int]
    encoded: EncodedUnits
    media: int
    trains: bool
    _features: "_Posted" = field(init=False)
    _gradients: "_Posted" = field(init=False)

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            ledger.add(INPUT, self.media)
            self._begin(ledger)
        held = 0
        if when.event is Event.GRADIENT and when.microbatch is not None:
            held = self._unit(when.microbatch)  # by the decoder's backward, in which it comes
        for operation in self.plan.get(when, ()):
            self._enter(ledger, operation, held=held)
        if when == END:
            ledger.take(INPUT, self.media)

    def _begin(self, ledger: Ledger) -> None:
        """The first receives are posted."""
        numbered = list(enumerate(self.pieces))
        coming = [self.consumed[n] for n, each in numbered if each.replica != self.replica]
        returning = [
            self.encoded.features(n)
            for n, each in numbered
            if each.replica == self.replica and not self.consumed[n] and self.trains
        ]
        self._features = _Posted(FEATURES, coming, most=WINDOW)
        self._gradients = _Posted(FEATURE_GRADIENTS, returning, most=1)
        self._features.fill(ledger)
        self._gradients.fill(ledger)

    def _enter(self, ledger: Ledger, operation: Operation, *, held: int) -> None:
        match operation:
            case Encode(pieces=pieces):
                self.encoded.encode(ledger, pieces)
                if len(pieces) > 1:
                    features = sum(map(self.encoded.features, pieces))
                    ledger.work("features of one pass are taken apart", features)
            case Send(what=Cargo.FEATURES, piece=piece):
                # What this rank needs itself stays; the rest is gone when it has been received.
                ledger.take(FEATURES, self.encoded.features(piece) - self.consumed[piece])
            case Receive(what=Cargo.FEATURES, piece=piece):
                if self._comes(piece):
                    self._features.took(ledger)
            case Hand(what=Cargo.FEATURES, microbatch=microbatch):
                if self._several(microbatch):
                    ledger.work("features of pieces are joined", self._unit(microbatch))
                ledger.take(FEATURES, self._unit(microbatch))
            case Hand(microbatch=microbatch):
                ledger.add(FEATURE_GRADIENTS, self._unit(microbatch))
                if self._several(microbatch):
                    ledger.work("gradients of pieces are taken apart", self._stays(microbatch))
            case Send(piece=piece):
                if not self._own(piece):
                    ledger.take(FEATURE_GRADIENTS, self.consumed[piece])
            case Receive(piece=piece):
                if not self.consumed[piece]:
                    self._gradients.took(ledger)
                else:  # of all consumers, put together
                    more = self.encoded.features(piece) - self.consumed[piece]
                    ledger.add(FEATURE_GRADIENTS, more)
            case Backward(pieces=pieces):
                self.encoded.go_back(ledger, pieces, held=held)
            case Move(to=To.FREE | To.RETURN as to, pieces=pieces):  # activations alone leave
                enter = ledger.take if to is To.FREE else ledger.add
                for piece in pieces:
                    enter(ENCODER, self._kept(piece))

    def _kept(self, piece: int) -> int:
        """Bytes of what the backward needs of the pass whose first piece it is."""
        (pieces,) = (
            each.pieces
            for operations in self.plan.values()
            for each in operations
            if isinstance(each, Encode) and each.pieces[0] == piece
        )
        return self.encoded.cost(pieces).kept

    def _stays(self, microbatch: int) -> int:
        """Bytes of a microbatch's features that this rank has made for its own decoder."""
        numbered = enumerate(self.pieces)
        mine = (n for n, each in numbered if each.microbatch == microbatch and self._own(n))
        return sum(map(self.consumed.__getitem__, mine))

    def _several(self, microbatch: int) -> bool:
        """Whether a microbatch has more than one piece."""
        return sum(each.microbatch == microbatch for each in self.pieces) > 1

    def _own(self, piece: int) -> bool:
        return self.pieces[piece].replica == self.replica

    def _comes(self, piece: int) -> bool:
        return bool(self.consumed[piece]) and not self._own(piece)

    def _unit(self, unit: int) -> int:
        """Bytes of a microbatch's features that this rank's decoder takes."""
        numbered = zip(self.pieces, self.consumed, strict=True)
        return sum(nbytes for each, nbytes in numbered if each.microbatch == unit)


class _Posted:
    """Receives under way, of which a few are posted ahead."""

    def __init__(self, name: str, sizes: Sequence[int], *, most: int) -> None:
        self._name = name
        self._most = most
        self._left = deque(size for size in sizes if size)
        self._under_way = 0

    def fill(self, ledger: Ledger) -> None:
        """Post as many as there may be."""
        while self._left and self._under_way < self._most:
            ledger.add(self._name, self._left.popleft())
            self._under_way += 1

    def took(self, ledger: Ledger) -> None:
        """The first one is here, and another one is posted."""
        self._under_way -= 1
        self.fill(ledger)
