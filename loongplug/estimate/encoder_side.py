"""What the plan of a step has in memory for the encoder."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loongplug.estimate.encoded_units import EncodedUnits
from loongplug.estimate.ledger import ENCODER, FEATURE_GRADIENTS, FEATURES, INPUT, Ledger
from loongplug.hetero.exchange import ExchangeSpec
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
    StepPlan,
    To,
    When,
)
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import (
    Rows,
    Transfer,
    feature_transfers,
    gradient_transfers,
    size,
    within,
)


@dataclass(frozen=True, kw_only=True)
class EncoderSide:
    """What a step's plan has in memory for an encoder of one rank, around the decoder's passes.

    ``away`` is what of the encoder's state leaves the device with it, by its name in the ledger.
    ``exchanged`` is what who exchanges units knows of them; ``encoded`` has this rank's shares.
    """

    plan: StepPlan
    away: Mapping[str, int]
    edge: Edge
    rank: int
    exchanged: ExchangeSpec
    encoded: EncodedUnits

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            ledger.add(INPUT, self.encoded.input(self.plan))
        held = 0
        if when.event is Event.GRADIENT and when.microbatch is not None:
            held = self._consumed(when.microbatch)  # by the decoder's backward, in which it comes
        for operation in self.plan.get(when, ()):
            self._enter(ledger, operation, held=held)
        if when == END:
            ledger.take(INPUT, self.encoded.input(self.plan))

    def _enter(self, ledger: Ledger, operation: Operation, *, held: int) -> None:
        match operation:
            case Encode(pieces=pieces):
                self.encoded.encode(ledger, pieces)
            case Exchange(what=Cargo.FEATURES, pieces=pieces, to_host=to_host):
                for some in self.exchanged.lots(pieces):
                    ledger.work("exchange of features", self._gathered(some, copied=not to_host))
                    ledger.take(FEATURES, sum(map(self.encoded.features, self._mine(some))))
                    if not to_host:
                        ledger.add(FEATURES, sum(map(self._consumed, some)))
            case Exchange(pieces=pieces):
                ledger.work("exchange of gradients", self._scattered(pieces))
                ledger.take(FEATURE_GRADIENTS, sum(map(self._consumed, pieces)))
                ledger.add(FEATURE_GRADIENTS, sum(map(self.encoded.features, self._mine(pieces))))
            case Hand(what=Cargo.FEATURES, microbatch=microbatch):
                # Used up before the forward has all that it leaves.
                ledger.take(FEATURES, self._consumed(microbatch))
            case Hand(microbatch=microbatch):
                ledger.add(FEATURE_GRADIENTS, self._consumed(microbatch))
            case Backward(pieces=pieces):
                self.encoded.go_back(ledger, pieces, held=held)
            case Move(to=To.FREE | To.RETURN as to, what=what, pieces=pieces):
                enter = ledger.take if to is To.FREE else ledger.add
                for name, nbytes in self._moved(what, pieces):
                    enter(name, nbytes)

    def _moved(self, what: Kept, pieces: tuple[int, ...]) -> list[tuple[str, int]]:
        match what:
            case Kept.STATE:
                return list(self.away.items())
            case Kept.ACTIVATIONS:
                return [(ENCODER, self.encoded.cost((piece,)).kept) for piece in pieces]
            case Kept.FEATURES:
                return [(FEATURES, self._consumed(piece)) for piece in pieces]
            case Kept.GRADIENTS:
                return [(FEATURE_GRADIENTS, self._consumed(piece)) for piece in pieces]

    def _consumed(self, unit: int) -> int:
        """Bytes of those that this rank's decoder takes."""
        shards = self.exchanged.shards
        if self.rank not in self.edge.consumers:
            return 0
        if shards is None:
            return self.exchanged.tokens[unit] * self.encoded.payload
        part = self.edge.part_of(self.rank, parts=self.exchanged.parts)
        return size(shards[unit][part]) * self.encoded.payload

    @property
    def _of_joined_passes(self) -> set[int]:
        """Units whose features are made in one piece with those of others."""
        found: set[int] = set()
        for each in self.plan.get(BEGIN, ()):
            if isinstance(each, Encode) and len(each.pieces) > 1:
                found |= {*each.pieces}
        return found

    def _mine(self, members: range) -> list[int]:
        """Those of these units of which this rank encodes a share."""
        replica = self.edge.replica_of(self.rank)
        return [unit for unit in members if replica in self.exchanged.encoder_replicas[unit]]

    def _gathered(self, members: range, *, copied: bool) -> int:
        """The most that it takes to bring these units' features here, beside their own payloads.

        What arrives is one piece of memory, what leaves another. With ``copied``, each unit's
        features then get memory of their own, but for whole payloads.
        """
        units = self.exchanged.part(members)
        found = self._exchanged(
            feature_transfers,
            units,
            has=units.encoded,
            needs=units.needed,
            views={unit - members.start for unit in self._of_joined_passes},
        )
        return found.received + max(
            found.sent + found.taken,
            found.taken + found.joined,
            found.joined + (found.views if copied else 0),
        )

    def _scattered(self, members: range) -> int:
        """The most that it takes to bring these units' gradients to the ranks that encoded them."""
        units = self.exchanged.part(members)
        found = self._exchanged(
            gradient_transfers, units, has=units.needed, needs=units.encoded, views=()
        )
        return found.received + found.taken + max(found.sent, found.joined)

    def _exchanged(
        self,
        transfers: Callable[..., Sequence[Transfer]],
        units: ExchangeSpec,
        *,
        has: Callable[[Transfer], Rows],
        needs: Callable[[Transfer], Rows],
        views: Container[int],
    ) -> "_Exchanged":
        """Rows go from where they are part of those it ``has`` to be part of those it ``needs``.

        Units in ``views`` lie in memory with others where they are made.
        """
        sent = received = taken = joined = viewed = 0
        whole: set[int] = set()  # units of which one transfer brings all that is needed
        parts: dict[int, int] = {}  # what is needed of others
        sharded = units.shards is not None
        for each in transfers(self.edge, units.encoder_replicas, parts=units.parts):
            rows = units.rows(each)
            count = size(rows)
            here, there = each.source == self.rank, each.target == self.rank
            if here and len(within(rows, has(each))) > 1:
                taken += count
            if here and not there:
                sent += count
            if there and not here:
                received += count
            if there and count == size(needs(each)):
                whole.add(each.unit)
                viewed += count if sharded or not here or each.unit in views else 0
            elif there:
                parts[each.unit] = size(needs(each))
        joined = sum(rows for unit, rows in parts.items() if unit not in whole)
        return _Exchanged(
            *(rows * self.encoded.payload for rows in (sent, received, taken, joined, viewed))
        )


class _Exchanged(NamedTuple):
    """Bytes of an exchange on one rank.

    ``taken`` are copied before they are sent or stay; ``joined`` is what is put together of several
    transfers, ``views`` what is used as it came, and lies in memory with other units.
    """

    sent: int
    received: int
    taken: int
    joined: int
    views: int
