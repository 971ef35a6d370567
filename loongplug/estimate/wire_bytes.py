"""What a wire has in memory on one rank: rows that are received ahead, kept, and being sent."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from loongplug.estimate.ledger import FEATURE_GRADIENTS, FEATURES, STATE_GRADIENTS, STATES, Ledger
from loongplug.hetero.operations import Cargo
from loongplug.hetero.routes import size
from loongplug.hetero.wire import NOTHING_OF_IT, WINDOW, Ends, PieceEnd, window

NAMES = {
    Cargo.FEATURES: FEATURES,
    Cargo.GRADIENTS: FEATURE_GRADIENTS,
    Cargo.STATES: STATES,
    Cargo.STATE_GRADIENTS: STATE_GRADIENTS,
}


@dataclass(kw_only=True)
class _Way:
    """One kind of rows in a step, in bytes by piece.

    A microbatch is so many ``pieces`` given here, and who takes them receives so many ``ahead``.
    """

    ends: Ends
    pieces: int
    ahead: int
    to_post: deque[int]
    under_way: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)  # for this rank itself
    sent: deque[tuple[int, int]] = field(default_factory=deque)  # as far as it may not be done
    given: int = 0  # pieces
    known: int = 0  # pieces before this one have arrived for certain


class WireBytes:
    """What a :class:`~loongplug.hetero.wire.Wire` of one ``rank`` has in memory in a step.

    What is sent is held until the next send finds it done. Which sends are done by then is known as
    far as the plan goes; an encoder that hears of no gradients is ahead of the decoder by as much
    as it may send at a time (:class:`~loongplug.hetero.sends.Sends`), and so it counts. Where
    there is no bound, nobody waits for a send, and what is sent counts as gone.
    """

    def __init__(
        self,
        ends: Callable[[Cargo], Ends],
        *,
        carries: Sequence[Cargo] = (Cargo.FEATURES, Cargo.GRADIENTS),
        rank: int,
        most: float,
        trains: bool,
    ) -> None:
        """``carries``: rows that go one way, and, where something ``trains``, what comes back."""
        self.carries = carries
        self._rank = rank
        self._most = most
        self._ways = {
            what: self._way(what, ends(what), trains=trains)
            for what in carries
            if trains or not what.back
        }

    def _way(self, what: Cargo, ends: Ends, *, trains: bool) -> _Way:
        pieces = sum(each.microbatch == 0 for each in ends.given.values())
        # A microbatch of the decoder's is several pieces here.
        ahead = WINDOW * (pieces if what is Cargo.FEATURES else 1)
        return _Way(
            ends=ends,
            pieces=pieces,
            ahead=ahead,
            to_post=deque(
                piece
                for piece, end in ends.taken.items()
                if {each.peer for each in end.messages} - {self._rank}
            ),
            known=ahead if trains else 0,  # else a receiver may begin late
        )

    def begin(self, ledger: Ledger) -> None:
        """The first receives are posted."""
        for what in self._ways:
            self._post(ledger, what)

    def send(self, ledger: Ledger, what: Cargo, piece: int, nbytes: int) -> None:
        """A piece of ``nbytes`` sets out, and its memory is free but for what stays here."""
        way = self._ways[what]
        end = way.ends.given.get(piece, NOTHING_OF_IT)
        row = nbytes // max(1, end.rows)
        stays, away = (row * self._rows(end, own=own) for own in (True, False))
        copied = row * sum(
            size(each.rows)
            for each in end.messages
            if len(each.rows) > 1 or (each.peer == self._rank and stays < nbytes)
        )
        ledger.work(f"exchange of {what.said}", copied)
        ledger.take(NAMES[what], nbytes - stays)
        if stays:
            way.kept[piece] = stays
        way.given += 1
        if not away or self._most == inf:
            return
        # Who encodes posts receives of gradients ahead: those before the last one have arrived.
        known = piece if what.back else way.known
        while way.sent and (way.sent[0][0] < known or self._waited_for(way, piece)):
            ledger.take(NAMES[what], way.sent.popleft()[1])
        way.sent.append((piece, away))
        ledger.add(NAMES[what], away)

    def rows(self, what: Cargo, piece: int) -> int:
        """How many this rank gives of a piece."""
        return self._ways[what].ends.given.get(piece, NOTHING_OF_IT).rows

    def stays(self, what: Cargo, piece: int, nbytes: int) -> int:
        """What of a piece of ``nbytes`` this rank gives to itself."""
        end = self._ways[what].ends.given.get(piece, NOTHING_OF_IT)
        return nbytes // max(1, end.rows) * self._rows(end, own=True)

    def receive(self, ledger: Ledger, what: Cargo, piece: int) -> int:
        """The bytes of a piece that this rank takes; the next one is received behind it."""
        way = self._ways[what]
        end = way.ends.taken.get(piece, NOTHING_OF_IT)
        whole = end.rows * _row(way.ends)
        came = way.kept.pop(piece, 0) + way.under_way.pop(piece, 0)
        self._post(ledger, what)
        if what.back:
            # Who takes what is made here is as far ahead of its backwards as this rank, but for
            # one microbatch, and receives earlier.
            for each in self._ways.values():
                each.known = each.given + each.ahead - each.pieces
        alone = any(size(each.rows) == end.rows for each in end.messages)
        ledger.work(f"exchange of {what.said}", 0 if alone else whole)
        ledger.add(NAMES[what], whole - came)
        return whole

    def drain(self, ledger: Ledger) -> None:
        """All that was sent has arrived."""
        for what, way in self._ways.items():
            ledger.take(NAMES[what], sum(nbytes for _, nbytes in way.sent))
            left = [*way.to_post, *way.under_way, *way.kept]
            assert not left, f"nobody took {what.said} of pieces {left}"

    def _waited_for(self, way: _Way, piece: int) -> bool:
        """Whether the oldest send is waited for before ``piece`` sets out."""
        oldest, now = (way.ends.given[each].microbatch or 0 for each in (way.sent[0][0], piece))
        return oldest <= now - self._most

    def _post(self, ledger: Ledger, what: Cargo) -> None:
        way = self._ways[what]
        while way.to_post and len(way.under_way) < window(what):
            piece = way.to_post.popleft()
            rows = self._rows(way.ends.taken[piece], own=False)
            way.under_way[piece] = rows * _row(way.ends)
            ledger.add(NAMES[what], way.under_way[piece])

    def _rows(self, end: PieceEnd, *, own: bool) -> int:
        """Those of a piece's messages between this rank and itself, or others."""
        return sum(size(each.rows) for each in end.messages if (each.peer == self._rank) == own)


def _row(ends: Ends) -> int:
    """Bytes of a row that is taken."""
    return ends.width * ends.dtype.itemsize
