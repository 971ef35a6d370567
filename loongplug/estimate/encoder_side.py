"""What the plan of a step has in memory for the encoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loongplug.estimate.ledger import FEATURE_GRADIENTS, FEATURES, Ledger
from loongplug.estimate.trace import ENCODER, Cost
from loongplug.estimate.units import UnitSize
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

PIXELS = "pixels"


def between(least: Cost, most: Cost, patches: int, *, smallest: int, largest: int) -> Cost:
    """The cost of a unit of so many patches: ``least`` of the smallest, ``most`` of the largest."""
    part = (max(patches, smallest) - smallest) / max(1, largest - smallest)

    def at(low: int, high: int) -> int:
        return round(low + (high - low) * part)

    return Cost(
        encoder=at(least.encoder, most.encoder),
        forward=at(least.forward, most.forward),
        backward=at(least.backward, most.backward),
    )


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoder on one rank, and the units of a step.

    ``cost`` is that of a unit of ``traced`` patches, ``blank`` of the smallest one, which stands in
    for no images; what lies between them grows with the patches.
    ``payload`` and ``pixels`` are the bytes of a visual token's features and of a patch;
    ``blank_pixels`` those that the backward of a unit without images keeps.
    """

    edge: Edge
    rank: int
    replica: int | None
    units: Sequence[UnitSize]
    encoder_replicas: tuple[int, ...]
    merge: int
    cost: Cost
    blank: Cost
    traced: int
    payload: int
    pixels: int
    blank_pixels: int
    copies_shards: bool  # a shard is of several pieces, which are put together to travel

    def of_unit(self, patches: int) -> Cost:
        """Of a unit of so many; without images, of the blank one, whose pixels are its own."""
        cost = between(self.blank, self.cost, patches, smallest=self.merge, largest=self.traced)
        return cost if patches else replace(cost, encoder=cost.encoder + self.blank_pixels)

    def features(self, unit: int) -> int:
        """Bytes of all of a unit's features."""
        return self.units[unit].patches // self.merge * self.payload

    def consumed(self, unit: int) -> int:
        """Bytes of those that this rank's decoder takes."""
        shards = self.units[unit].shards
        if self.rank not in self.edge.consumers:
            return 0
        if shards is None:
            return self.features(unit)
        return shards[self.edge.consumers.index(self.rank)] * self.payload

    def moved(self, transfers: Callable[..., Sequence[Transfer]], members: range) -> "Moved":
        """What an exchange of these units sends from here, and what comes here."""
        encoder_replicas = self.encoder_replicas[members.start : members.stop]
        sent = received = 0
        for each in transfers(self.edge, encoder_replicas, sharded=self.sharded):
            unit = members.start + each.unit  # transfers count units from 0
            shards = self.units[unit].shards
            nbytes = self.features(unit)
            if each.shard is not None and shards is not None:
                nbytes = shards[each.shard] * self.payload
            if each.source == each.target:
                continue
            sent += nbytes if each.source == self.rank else 0
            received += nbytes if each.target == self.rank else 0
        return Moved(sent=sent, received=received)

    def mine(self, members: range) -> list[int]:
        """Those of these units that this rank encodes."""
        return [unit for unit in members if self.encoder_replicas[unit] == self.replica]

    def gathered(self, members: range, *, copied: bool) -> int:
        """The most that it takes to bring these units' features here, beside their own payloads.

        What arrives is one piece of memory, what leaves another. With ``copied``, each unit's
        features then get memory of their own, but for whole payloads.
        """
        moved = self.moved(feature_transfers, members)
        shards = sum(self.consumed(unit) for unit in self.mine(members)) if self.sharded else 0
        taken = moved.sent + shards if self.copies_shards else 0
        return moved.received + max(moved.sent + taken, moved.received + shards if copied else 0)

    def scattered(self, members: range) -> int:
        """The most that it takes to bring these units' gradients to the ranks that encoded them."""
        moved = self.moved(gradient_transfers, members)
        whole = sum(self.features(unit) for unit in self.mine(members)) if self.sharded else 0
        return moved.received + max(moved.sent, whole)

    @property
    def sharded(self) -> bool:
        """Whether each consumer takes a part of the features only."""
        return self.units[0].shards is not None


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of an exchange, seen from one rank."""

    sent: int
    received: int


class EncoderSide:
    """Adds up what a step's plan has in memory for the encoder, around the decoder's passes.

    ``away`` is what of the encoder's state leaves the device with it, by its name in the ledger.
    """

    def __init__(self, plan: StepPlan, encoding: Encoding, *, away: Mapping[str, int]) -> None:
        self._plan = plan
        self._of = encoding
        self._away = away
        self._own_pixels = encoding.pixels * sum(
            encoding.units[each.unit].patches
            for operations in plan.values()
            for each in operations
            if isinstance(each, Encode) and each.unit is not None
        )

    def at(self, ledger: Ledger, when: When) -> None:
        """Enter what the operations at ``when`` make and free."""
        if when == BEGIN:
            ledger.add(PIXELS, self._own_pixels)
        for operation in self._plan.get(when, ()):
            self._enter(ledger, operation, held=self._held(when))
        if when == END:
            ledger.clear(PIXELS)

    def _held(self, when: When) -> int:
        """The decoder's backward, within which a gradient comes, holds it."""
        if when.event is not Event.GRADIENT or when.microbatch is None:
            return 0
        return self._of.consumed(when.microbatch)

    def _enter(self, ledger: Ledger, operation: Operation, *, held: int) -> None:
        of = self._of
        match operation:
            case Encode(unit=unit):
                cost = of.of_unit(self._patches(unit))
                ledger.add(ENCODER, cost.encoder)
                ledger.work("encoder's forward", cost.forward - cost.encoder)
                ledger.add(FEATURES, self._features(unit))
            case GatherFeatures(units=units, to_host=to_host):
                ledger.work("exchange of features", of.gathered(units, copied=not to_host))
                ledger.take(FEATURES, sum(of.features(unit) for unit in of.mine(units)))
                if not to_host:
                    ledger.add(FEATURES, sum(of.consumed(unit) for unit in units))
            case TakeFeatures(unit=unit):
                # Used up before the forward has all that it leaves.
                ledger.take(FEATURES, of.consumed(unit))
            case KeepGradient(unit=unit):
                ledger.add(FEATURE_GRADIENTS, of.consumed(unit))
            case ScatterGradients(units=units):
                ledger.work("exchange of gradients", of.scattered(units))
                ledger.take(FEATURE_GRADIENTS, sum(of.consumed(unit) for unit in units))
                ledger.add(FEATURE_GRADIENTS, sum(of.features(unit) for unit in of.mine(units)))
            case EncoderBackward(unit=unit):
                cost = of.of_unit(self._patches(unit))
                ledger.work("encoder's backward", held + cost.backward)
                ledger.take(ENCODER, cost.encoder)
                ledger.take(FEATURE_GRADIENTS, self._features(unit))
            case Release(what=what, units=units):
                for name, nbytes in self._moved(what, units):
                    ledger.take(name, nbytes)
            case Reload(what=what, units=units):
                for name, nbytes in self._moved(what, units):
                    ledger.add(name, nbytes)
            case EncodeInForward() | Offload() | Await():
                pass  # traced with the decoder; memory changes with Release and Reload

    def _moved(self, what: Kept, units: tuple[int, ...]) -> list[tuple[str, int]]:
        of = self._of
        match what:
            case Kept.STATE:
                return list(self._away.items())
            case Kept.ACTIVATIONS:
                return [(ENCODER, of.of_unit(self._patches(unit)).encoder) for unit in units]
            case Kept.FEATURES:
                return [(FEATURES, of.consumed(unit)) for unit in units]
            case Kept.GRADIENTS:
                return [(FEATURE_GRADIENTS, of.consumed(unit)) for unit in units]

    def _patches(self, unit: int | None) -> int:
        return 0 if unit is None else self._of.units[unit].patches

    def _features(self, unit: int | None) -> int:
        """Bytes of a unit's payload; one without media has no rows."""
        return 0 if unit is None else self._of.features(unit)
