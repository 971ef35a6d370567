"""What the plan of a step has in memory for the encoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loongplug.estimate.encoded_units import EncodedUnits
from loongplug.estimate.ledger import ENCODER, FEATURE_GRADIENTS, FEATURES, INPUT, Ledger
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Await,
    Encode,
    EncodeInForward,
    EncoderBackward,
    Event,
    GatherFeatures,
    KeepGradient,
    Kept,
    Offload,
    Operation,
    Release,
    Reload,
    ScatterGradients,
    StepPlan,
    TakeFeatures,
    When,
)
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import Transfer, feature_transfers, gradient_transfers


@dataclass(frozen=True, kw_only=True)
class EncoderSide:
    """What a step's plan has in memory for an encoder of one rank, around the decoder's passes.

    ``away`` is what of the encoder's state leaves the device with it, by its name in the ledger.
    """

    plan: StepPlan
    away: Mapping[str, int]
    edge: Edge
    rank: int
    encoder_replicas: tuple[int, ...]
    encoded: EncodedUnits
    copies_shards: bool  # a shard is of several pieces, which are put together to travel

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
            case Encode(unit=unit):
                self.encoded.encode(ledger, unit)
            case GatherFeatures(units=units, to_host=to_host):
                ledger.work("exchange of features", self._gathered(units, copied=not to_host))
                ledger.take(FEATURES, sum(map(self.encoded.features, self._mine(units))))
                if not to_host:
                    ledger.add(FEATURES, sum(map(self._consumed, units)))
            case TakeFeatures(unit=unit):
                # Used up before the forward has all that it leaves.
                ledger.take(FEATURES, self._consumed(unit))
            case KeepGradient(unit=unit):
                ledger.add(FEATURE_GRADIENTS, self._consumed(unit))
            case ScatterGradients(units=units):
                ledger.work("exchange of gradients", self._scattered(units))
                ledger.take(FEATURE_GRADIENTS, sum(map(self._consumed, units)))
                ledger.add(FEATURE_GRADIENTS, sum(map(self.encoded.features, self._mine(units))))
            case EncoderBackward(unit=unit):
                self.encoded.go_back(ledger, unit, held=held)
            case Release(what=what, units=units) | Reload(what=what, units=units):
                enter = ledger.take if isinstance(operation, Release) else ledger.add
                for name, nbytes in self._moved(what, units):
                    enter(name, nbytes)
            case EncodeInForward() | Offload() | Await():
                pass  # traced with the decoder; memory changes with Release and Reload

    def _moved(self, what: Kept, units: tuple[int, ...]) -> list[tuple[str, int]]:
        match what:
            case Kept.STATE:
                return list(self.away.items())
            case Kept.ACTIVATIONS:
                return [(ENCODER, self.encoded.cost(unit).kept) for unit in units]
            case Kept.FEATURES:
                return [(FEATURES, self._consumed(unit)) for unit in units]
            case Kept.GRADIENTS:
                return [(FEATURE_GRADIENTS, self._consumed(unit)) for unit in units]

    def _consumed(self, unit: int) -> int:
        """Bytes of those that this rank's decoder takes."""
        shards = self.encoded.units[unit].shards
        if self.rank not in self.edge.consumers:
            return 0
        if shards is None:
            return self.encoded.features(unit)
        return shards[self.edge.consumers.index(self.rank)] * self.encoded.payload

    def _exchanged(
        self, transfers: Callable[..., Sequence[Transfer]], members: range
    ) -> tuple[int, int]:
        """Bytes that an exchange of these units sends from here, and those that come here."""
        encoder_replicas = self.encoder_replicas[members.start : members.stop]
        sent = received = 0
        for each in transfers(self.edge, encoder_replicas, sharded=self._sharded):
            unit = members.start + each.unit  # transfers count units from 0
            shards = self.encoded.units[unit].shards
            nbytes = self.encoded.features(unit)
            if each.shard is not None and shards is not None:
                nbytes = shards[each.shard] * self.encoded.payload
            if each.source == each.target:
                continue
            sent += nbytes if each.source == self.rank else 0
            received += nbytes if each.target == self.rank else 0
        return sent, received

    def _mine(self, members: range) -> list[int]:
        """Those of these units that this rank encodes."""
        replica = self.edge.replica_of(self.rank)
        return [unit for unit in members if self.encoder_replicas[unit] == replica]

    def _gathered(self, members: range, *, copied: bool) -> int:
        """The most that it takes to bring these units' features here, beside their own payloads.

        What arrives is one piece of memory, what leaves another. With ``copied``, each unit's
        features then get memory of their own, but for whole payloads.
        """
        sent, received = self._exchanged(feature_transfers, members)
        shards = sum(map(self._consumed, self._mine(members))) if self._sharded else 0
        taken = sent + shards if self.copies_shards else 0
        return received + max(sent + taken, received + shards if copied else 0)

    def _scattered(self, members: range) -> int:
        """The most that it takes to bring these units' gradients to the ranks that encoded them."""
        sent, received = self._exchanged(gradient_transfers, members)
        whole = sum(map(self.encoded.features, self._mine(members))) if self._sharded else 0
        return received + max(sent, whole)

    @property
    def _sharded(self) -> bool:
        """Whether each consumer takes a part of the features only."""
        return self.encoded.units[0].shards is not None
