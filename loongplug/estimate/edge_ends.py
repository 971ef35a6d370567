"""What a step's plan has in memory at the two ends of an edge between modules' own ranks.

Nobody waits for a send before the step's end: what is sent is held until the next send finds it
done. Which sends are done by then is known as far as the plan goes; an encoder that hears of no
gradients may be any number of microbatches ahead of the decoder, and so it counts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loongplug.estimate.encoded_units import EncodedUnits
from loongplug.estimate.ledger import FEATURE_GRADIENTS, FEATURES, INPUT, Ledger
from loongplug.hetero.edge import WINDOW
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Encode,
    EncoderBackward,
    GatherFeatures,
    KeepGradient,
    Operation,
    ScatterGradients,
    StepPlan,
    TakeFeatures,
    When,
)


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
            case GatherFeatures(units=range(start=unit)):
                self._post(ledger, unit + WINDOW)
                received, whole = self.received[unit], self.consumed[unit]
                copied = whole if received < whole or self.messages > 1 else 0
                ledger.work("exchange of features", copied)
                ledger.add(FEATURES, whole - received)
            case TakeFeatures(unit=unit):
                # Used up before the forward has all that it leaves.
                ledger.take(FEATURES, self.consumed[unit])
            case KeepGradient(unit=unit):
                ledger.add(FEATURE_GRADIENTS, self.consumed[unit])
            case ScatterGradients(units=range(start=unit)):
                ledger.work("exchange of gradients", 0)
                sent = self.received[unit]
                ledger.take(FEATURE_GRADIENTS, self.consumed[unit] - sent)
                if sent:  # the encoder's rank has posted its receives long before
                    ledger.take(FEATURE_GRADIENTS, self._sent)
                    self._sent = sent
            case _:
                raise AssertionError(f"not of a rank that decodes: {operation}")

    def _post(self, ledger: Ledger, microbatch: int) -> None:
        if microbatch < len(self.received):
            ledger.add(FEATURES, self.received[microbatch])


@dataclass(kw_only=True)
class EncoderEnd:
    """One rank of the encoder, of one step: ``pieces`` of its units to a microbatch.

    ``leads``: it sends and receives for its tensor parallel group. ``copies``: what goes to one
    rank of the decoder is of several stretches of a piece's rows, which are put together.
    """

    plan: StepPlan
    encoded: EncodedUnits
    pieces: int
    trains: bool
    leads: bool
    copies: bool
    _sent: deque[int] = field(default_factory=deque, init=False)  # units whose send may not be done
    _made: int = field(default=0, init=False)  # units
    _arrived: int = field(default=0, init=False)  # units of which it is known

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            ledger.add(INPUT, self.encoded.input(self.plan))
            self._arrived = WINDOW * self.pieces
        for operation in self.plan.get(when, ()):
            self._enter(ledger, operation)
        if when == END:
            ledger.take(FEATURES, sum(map(self.encoded.features, self._sent)))
            ledger.take(INPUT, self.encoded.input(self.plan))

    def _enter(self, ledger: Ledger, operation: Operation) -> None:
        features = self.encoded.features
        match operation:
            case Encode(unit=unit):
                self.encoded.encode(ledger, unit)
            case GatherFeatures(units=range(start=unit)):
                self._made = unit + 1
                if not self.leads or not features(unit):  # who has no rows sends nothing
                    ledger.take(FEATURES, features(unit))
                    return
                ledger.work("exchange of features", features(unit) if self.copies else 0)
                while self._sent and self._sent[0] < self._arrived:
                    ledger.take(FEATURES, features(self._sent.popleft()))
                self._sent.append(unit)
                if self.trains:  # a receive is posted
                    ledger.add(FEATURE_GRADIENTS, features(unit))
            case ScatterGradients(units=range(start=unit)):
                if not self.leads:
                    ledger.add(FEATURE_GRADIENTS, features(unit))
                ledger.work("exchange of gradients", features(unit))  # whole, beside what came
                # The decoder is as far ahead of its backwards as this rank but for one microbatch,
                # and receives earlier.
                self._arrived = self._made + (WINDOW - 1) * self.pieces
            case EncoderBackward(unit=unit):
                self.encoded.go_back(ledger, unit)
            case _:
                raise AssertionError(f"not of a rank that encodes alone: {operation}")
