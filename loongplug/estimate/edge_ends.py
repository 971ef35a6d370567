"""What a step's plan has in memory at the two ends of an edge between modules' own ranks.

What is sent is held until the next send finds it done. Which sends are done by then is known as far
as the plan goes; an encoder that hears of no gradients is ahead of the decoder by as much as it may
send at a time (:class:`~loongplug.hetero.sends.Sends`), and so it counts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loongplug.estimate.encoded_units import EncodedUnits
from loongplug.estimate.ledger import (
    FEATURE_GRADIENTS,
    FEATURES,
    INPUT,
    STATE_GRADIENTS,
    STATES,
    Ledger,
)
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    Hand,
    Operation,
    Receive,
    Send,
    StepPlan,
    When,
)
from loongplug.hetero.wire import WINDOW


@dataclass(kw_only=True)
class DecoderEnd:
    """One rank of the decoder, of one step, for one encoder.

    Bytes by microbatch: ``consumed`` are the features that it takes, ``received`` those of them
    that come over the edge to this rank, in so many ``messages``, and whose gradients it sends.
    All are 0 on ranks that take none.
    """

    plan: StepPlan
    consumed: Sequence[int]
    received: Sequence[int]
    messages: int
    _sent: int = field(default=0, init=False)  # of gradients, by the last send

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            for microbatch in range(WINDOW):
                self._post(ledger, microbatch)
        for operation in self.plan.get(when, ()):
            self._enter(ledger, operation)
        if when == END:
            ledger.take(FEATURE_GRADIENTS, self._sent)

    def _enter(self, ledger: Ledger, operation: Operation) -> None:
        match operation:
            case Receive(piece=unit):
                self._post(ledger, unit + WINDOW)
                received, whole = self.received[unit], self.consumed[unit]
                copied = whole if received < whole or self.messages > 1 else 0
                ledger.work("exchange of features", copied)
                ledger.add(FEATURES, whole - received)
            case Hand(what=Cargo.FEATURES, microbatch=unit):
                # Used up before the forward has all that it leaves.
                ledger.take(FEATURES, self.consumed[unit])
            case Hand(microbatch=unit):
                ledger.add(FEATURE_GRADIENTS, self.consumed[unit])
            case Send(piece=unit):
                ledger.work("exchange of gradients", 0)
                sent = self.received[unit]
                ledger.take(FEATURE_GRADIENTS, self.consumed[unit] - sent)
                if sent:  # the encoder's rank posts its receives ahead
                    ledger.take(FEATURE_GRADIENTS, self._sent)
                    self._sent = sent
            case _:
                raise AssertionError(f"not of a rank that decodes: {operation}")

    def _post(self, ledger: Ledger, microbatch: int) -> None:
        if microbatch < len(self.received):
            ledger.add(FEATURES, self.received[microbatch])


@dataclass(kw_only=True)
class GivenStates:
    """What a stage of an encoder is given by the one before, on one rank, in one step.

    ``nbytes`` are those of each unit. ``trains``: something before this stage does, and gradients
    go back to it; else the backward of this one may still need the states, where it ``keeps`` them.
    """

    nbytes: Sequence[int]
    trains: bool
    keeps: bool
    _sent: int = field(default=0, init=False)  # of gradients, by the last send

    def begin(self, ledger: Ledger) -> None:
        """Receives are posted ahead."""
        for unit in range(WINDOW):
            self._post(ledger, unit)

    def take(self, ledger: Ledger, unit: int) -> None:
        """A unit's are there, and the next receive is posted."""
        self._post(ledger, unit + WINDOW)

    def used(self, ledger: Ledger, unit: int) -> None:
        """Its forward is through."""
        if not self.trains and not self.keeps:
            ledger.take(STATES, self.nbytes[unit])

    def gone_back(self, ledger: Ledger, unit: int) -> None:
        """Its backward is through."""
        if self.trains:
            ledger.add(STATE_GRADIENTS, self.nbytes[unit])
        elif self.keeps:
            ledger.take(STATES, self.nbytes[unit])

    def give_back(self, ledger: Ledger, unit: int) -> None:
        """Its gradient sets out; its receive is posted ahead."""
        ledger.take(STATES, self.nbytes[unit])
        ledger.take(STATE_GRADIENTS, self._sent)
        self._sent = self.nbytes[unit]

    def end(self, ledger: Ledger) -> None:
        """The last send is done."""
        ledger.take(STATE_GRADIENTS, self._sent)

    def _post(self, ledger: Ledger, unit: int) -> None:
        if unit < len(self.nbytes):
            ledger.add(STATES, self.nbytes[unit])


@dataclass(kw_only=True)
class EncoderEnd:
    """One rank of the encoder, of one step: ``pieces`` of its units to a microbatch.

    ``leads``: it sends and receives for its tensor parallel group. ``copies``: what goes to one
    rank of the decoder is of several stretches of a piece's rows, which are put together.
    ``in_flight`` are how many microbatches it may be sending at a time. ``given`` is None on the
    encoder's first stage, which is given media.
    """

    plan: StepPlan
    encoded: EncodedUnits
    pieces: int
    trains: bool
    leads: bool
    copies: bool
    in_flight: int
    given: GivenStates | None = None
    _sent: deque[int] = field(default_factory=deque, init=False)  # units whose send may not be done
    _made: int = field(default=0, init=False)  # units
    _arrived: int = field(default=0, init=False)  # units of which it is known
    _posted: int = field(default=0, init=False)  # units whose gradients are received

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            ledger.add(INPUT, self.encoded.input(self.plan))
            self._arrived = self._ahead if self.trains else 0  # a receiver may begin late
            self._post(ledger)
            if self.given is not None:
                self.given.begin(ledger)
        for operation in self.plan.get(when, ()):
            self._enter(ledger, operation)
        if when == END:
            ledger.take(self.encoded.kind, sum(map(self.encoded.features, self._sent)))
            ledger.take(INPUT, self.encoded.input(self.plan))
            if self.given is not None:
                self.given.end(ledger)

    @property
    def _ahead(self) -> int:
        """Units for which a receive is posted ahead of the one that is taken."""
        return WINDOW * (1 if self.encoded.kind == STATES else self.pieces)

    def _enter(self, ledger: Ledger, operation: Operation) -> None:
        encoded, given = self.encoded, self.given
        match operation:
            case Encode(pieces=pieces):
                encoded.encode(ledger, pieces)
                if given is not None and pieces:
                    given.used(ledger, *pieces)
            case Send(what=Cargo.FEATURES | Cargo.STATES, piece=unit):
                self._send(ledger, unit)
            case Receive(what=Cargo.GRADIENTS, piece=unit):
                if not self.leads:
                    ledger.add(FEATURE_GRADIENTS, encoded.features(unit))
                self._hear(ledger)
                # Whole, beside what came of each part of the sequence; counted of one, too.
                ledger.work("exchange of gradients", encoded.features(unit))
            case Receive(what=Cargo.STATE_GRADIENTS):
                self._hear(ledger)
            case Backward(pieces=pieces):
                encoded.go_back(ledger, pieces)
                if given is not None and pieces:
                    given.gone_back(ledger, *pieces)
            case Receive(piece=unit):
                assert given is not None, "not of the first stage"
                given.take(ledger, unit)
            case Send(piece=unit):
                assert given is not None, "not of the first stage"
                given.give_back(ledger, unit)
            case _:
                raise AssertionError(f"not of a rank that encodes alone: {operation}")

    def _send(self, ledger: Ledger, unit: int) -> None:
        """A unit's features, or the states that the next stage is given."""
        features, kind = self.encoded.features, self.encoded.kind
        self._made = unit + 1
        if not self.leads or not features(unit):  # who has no rows sends nothing
            ledger.take(kind, features(unit))
            return
        ledger.work(f"exchange of {kind}", features(unit) if self.copies else 0)
        waited_for = unit // self.pieces - self.in_flight  # a microbatch
        while self._sent and (
            self._sent[0] < self._arrived or self._sent[0] // self.pieces <= waited_for
        ):
            ledger.take(kind, features(self._sent.popleft()))
        self._sent.append(unit)

    def _hear(self, ledger: Ledger) -> None:
        """A gradient is there.

        Who takes what is made here is as far ahead of its backwards as this rank, but for one
        microbatch, and receives earlier.
        """
        self._arrived = self._made + self._ahead - self.pieces
        self._post(ledger)

    def _post(self, ledger: Ledger) -> None:
        """Receive the next unit's gradient, where there is one."""
        if self.trains and self.leads and self._posted < len(self.encoded.units):
            features = self.encoded.features(self._posted)
            ledger.add(self.encoded.kind_of_gradients, features)
            self._posted += 1
