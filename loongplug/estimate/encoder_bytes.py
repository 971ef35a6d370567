"""What the plan of a step has in memory for an encoder: the operations of one rank, in bytes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from loongplug.estimate.encoded_units import EncodedUnits
from loongplug.estimate.exchange_bytes import ExchangeBytes
from loongplug.estimate.ledger import ENCODER, FEATURE_GRADIENTS, FEATURES, INPUT, STATES, Ledger
from loongplug.estimate.wire_bytes import NAMES, WireBytes
from loongplug.hetero.crossings import Crossings
from loongplug.hetero.dealing import Deal
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    Event,
    Exchange,
    Hand,
    Kept,
    Move,
    Operation,
    Receive,
    Send,
    StepPlan,
    To,
    Weights,
    When,
)
from loongplug.hetero.routes import common, size

Held = defaultdict[Cargo, dict[int, int]]


@dataclass(kw_only=True)
class EncoderBytes:
    """One rank's encoder side of a step, around and within the decoder's passes.

    It does the plan as the executor does, with bytes in the place of tensors. ``encoded`` has the
    pieces that this rank encodes; they go over ``wires``, or in an ``exchange`` of all ranks.
    Where this rank's decoder is dealt what comes over a wire, ``crossings`` say how.
    ``away`` is what of the encoder's state leaves the device with it, by its name in the ledger.
    ``streamed`` are the pieces of each microbatch in a step that streams; else each is one.
    ``trains_before``: states that are given to this stage get gradients.
    """

    plan: StepPlan
    encoded: EncodedUnits
    wires: Sequence[WireBytes] = ()
    exchange: ExchangeBytes | None = None
    crossings: Crossings | None = None
    away: Mapping[str, int] = MappingProxyType({})
    streamed: Sequence[range] = ()
    trains_before: bool = False
    # By piece, what has not been used up yet: what came here, and what was made here to leave.
    _came: Held = field(default_factory=lambda: defaultdict(dict), init=False)
    _made: Held = field(default_factory=lambda: defaultdict(dict), init=False)
    # By microbatch, what the decoder has used up.
    _handed: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        operations = [each for several in self.plan.values() for each in several]
        encodings = [each.pieces for each in operations if isinstance(each, Encode)]
        self._passes = {pieces[:1]: pieces for pieces in encodings}
        self._media = sum(map(self.encoded.input, self._passes.values()))
        self._by_cargo = {what: wire for wire in self.wires for what in wire.carries}
        features = Cargo.FEATURES, Cargo.GRADIENTS
        states = Cargo.STATES, Cargo.STATE_GRADIENTS
        self._there, self._back = features if self.encoded.states is None else states

    @property
    def _row(self) -> int:
        """Bytes of a token's features."""
        return self.encoded.width * self.encoded.dtype.itemsize

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            ledger.add(INPUT, self._media)
            for wire in self.wires:
                wire.begin(ledger)
        held = 0
        if when.event is Event.GRADIENT and when.microbatch in self._handed:
            # By the decoder's backward, in which it comes.
            held = self._handed[when.microbatch]
        for operation in self.plan.get(when, ()):
            self._enter(ledger, operation, held=held)
        if when == END:
            for wire in self.wires:
                wire.drain(ledger)
            ledger.take(INPUT, self._media)

    def _enter(self, ledger: Ledger, operation: Operation, *, held: int) -> None:
        match operation:
            case Encode(pieces=pieces):
                self._encode(ledger, pieces)
            case Backward(pieces=pieces):
                self._go_back(ledger, pieces, held=held)
            case Send(what=what, piece=piece):
                if what is Cargo.STATE_GRADIENTS:
                    self._let_go_of_states(ledger, (piece,))
                self._by_cargo[what].send(ledger, what, piece, self._made[what].pop(piece))
            case Receive(what=what, piece=piece):
                self._came[what][piece] = self._by_cargo[what].receive(ledger, what, piece)
            case Exchange(what=Cargo.FEATURES, pieces=pieces, to_host=to_host):
                self._gather(ledger, pieces, to_host=to_host)
            case Exchange(pieces=pieces):
                self._scatter(ledger, pieces)
            case Hand(what=Cargo.FEATURES, microbatch=microbatch):
                self._features_to_decoder(ledger, microbatch)
            case Hand(microbatch=microbatch):
                self._gradient_of_decoder(ledger, microbatch)
            case Move(to=To.FREE | To.RETURN as to, what=what, pieces=pieces):
                enter = ledger.take if to is To.FREE else ledger.add
                for name, nbytes in self._moved(what, pieces):
                    enter(name, nbytes)
            case Move() | Weights():
                pass  # copies set out or have come; weights are whole all along in an estimate

    def _encode(self, ledger: Ledger, pieces: tuple[int, ...]) -> None:
        cost, made = self.encoded.cost(pieces), {each: self.encoded.made(each) for each in pieces}
        ledger.add(ENCODER, cost.kept)
        ledger.work("encoder's forward", cost.forward - cost.kept)
        ledger.add(NAMES[self._there], sum(made.values()))
        if len(pieces) > 1 and self.streamed:
            ledger.work("features of one pass are taken apart", sum(made.values()))
        self._made[self._there] |= made
        if not self.trains_before and not cost.keeps_input:
            self._let_go_of_states(ledger, pieces)

    def _go_back(self, ledger: Ledger, pieces: tuple[int, ...], *, held: int) -> None:
        cost, came = self.encoded.cost(pieces), sum(map(self._came[self._back].pop, pieces))
        if len(pieces) > 1:
            ledger.work("gradients put together", came)
        made = sum(map(self.encoded.made, pieces))  # of a replica's ranks, one has received it
        ledger.add(NAMES[self._back], made - came)
        ledger.work("encoder's backward", held + cost.backward)
        ledger.take(ENCODER, cost.kept)
        ledger.take(NAMES[self._back], made)
        if self.trains_before:
            back = {piece: self._came[Cargo.STATES][piece] for piece in pieces}
            ledger.add(NAMES[Cargo.STATE_GRADIENTS], sum(back.values()))
            self._made[Cargo.STATE_GRADIENTS] |= back
        else:
            self._let_go_of_states(ledger, pieces)

    def _let_go_of_states(self, ledger: Ledger, pieces: tuple[int, ...]) -> None:
        """Of the stage before."""
        ledger.take(STATES, sum(self._came[Cargo.STATES].pop(piece, 0) for piece in pieces))

    def _gather(self, ledger: Ledger, pieces: range, *, to_host: bool) -> None:
        assert self.exchange is not None, "pieces go over wires"
        joined = {piece for several in self._passes.values() if several[1:] for piece in several}
        for some in self.exchange.spec.lots(pieces):
            takes = self.exchange.gathered(some, joined=joined, copied=not to_host)
            ledger.work("exchange of features", takes)
            mine, came = self.exchange.mine(some), self.exchange.consumed(some)
            ledger.take(FEATURES, sum(map(self._made[Cargo.FEATURES].pop, mine)))
            self._came[Cargo.FEATURES] |= came
            if not to_host:
                ledger.add(FEATURES, sum(came.values()))

    def _scatter(self, ledger: Ledger, pieces: range) -> None:
        assert self.exchange is not None, "pieces go over wires"
        mine = {piece: self.encoded.made(piece) for piece in self.exchange.mine(pieces)}
        ledger.work("exchange of gradients", self.exchange.scattered(pieces))
        ledger.take(FEATURE_GRADIENTS, sum(self._made[Cargo.GRADIENTS].pop(n, 0) for n in pieces))
        ledger.add(FEATURE_GRADIENTS, sum(mine.values()))
        self._came[Cargo.GRADIENTS] |= mine

    def _features_to_decoder(self, ledger: Ledger, microbatch: int) -> None:
        pieces = self.streamed[microbatch] if self.streamed else (microbatch,)
        held = needed = sum(map(self._came[Cargo.FEATURES].pop, pieces))
        if len(pieces) > 1:
            ledger.work("features of pieces are joined", held)
        if self.crossings is not None:
            deal, mine = self.crossings.deal(microbatch), self.crossings.rank
            needed = self._row * size(deal.needs[deal.ranks.index(mine)])
            ledger.work("features are dealt", self._row * _at_once(deal, rank=mine))
        self._handed[microbatch] = needed
        ledger.add(FEATURES, needed - held)
        # Used up before the forward has all that it leaves.
        ledger.take(FEATURES, needed)

    def _gradient_of_decoder(self, ledger: Ledger, microbatch: int) -> None:
        pieces = self.streamed[microbatch] if self.streamed else (microbatch,)
        came = dict.fromkeys(pieces, self._handed[microbatch])
        if self.crossings is not None:
            wire = self._by_cargo[Cargo.GRADIENTS]
            came = {each: self._row * wire.rows(Cargo.GRADIENTS, each) for each in pieces}
            deal, mine = self.crossings.deal(microbatch), self.crossings.rank
            if deal.chunked:
                ledger.work("gradients are dealt", self._row * _at_once(deal.back, rank=mine))
        self._made[Cargo.GRADIENTS] |= came
        ledger.add(FEATURE_GRADIENTS, sum(came.values()))
        if len(came) > 1:
            wire = self._by_cargo[Cargo.GRADIENTS]
            stays = (wire.stays(Cargo.GRADIENTS, *each) for each in came.items())
            ledger.work("gradients of pieces are taken apart", sum(stays))

    def _moved(self, what: Kept, pieces: tuple[int, ...]) -> list[tuple[str, int]]:
        match what:
            case Kept.STATE:
                return list(self.away.items())
            case Kept.ACTIVATIONS:
                passes = (self._passes[piece,] for piece in pieces)
                return [(ENCODER, self.encoded.cost(each).kept) for each in passes]
            case Kept.FEATURES:
                return [(FEATURES, self._came[Cargo.FEATURES][piece]) for piece in pieces]
            case Kept.GRADIENTS:
                return [(FEATURE_GRADIENTS, self._made[Cargo.GRADIENTS][each]) for each in pieces]


def _at_once(deal: Deal, *, rank: int) -> int:
    """Rows that a rank has at most beside those that it holds, while they are dealt."""
    mine, holds = deal.ranks.index(rank), [*map(size, deal.holds)]
    others = [rows for number, rows in enumerate(holds) if number != mine]
    if len(holds) == 1 or not deal.rows:
        return 0
    if not deal.chunked:  # one broadcast, or several into what all need
        several = sum(map(bool, holds)) > 1
        return max(others, default=0) + (deal.rows if several else 0)
    wants = deal.needs[mine]
    sources = sum(bool(common(each, wants)) for each in deal.holds)
    return size(wants) + max(holds[mine], size(wants) if sources > 1 else 0)
