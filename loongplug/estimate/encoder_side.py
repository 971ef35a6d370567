"""What the plan of a step has in memory for the encoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loongplug.estimate.ledger import ENCODER, FEATURE_GRADIENTS, FEATURES, PIXELS, Ledger
from loongplug.estimate.trace import Cost
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


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What units of any size cost: what lies between two traced ones grows with the patches.

    ``blank`` is the cost of the smallest, of so many ``blank_patches``, which stands in for no
    images.
    """

    blank: Cost
    blank_patches: int
    largest: Cost
    largest_patches: int

    def of(self, patches: int) -> Cost:
        """Of a unit of so many."""
        more = max(patches, self.blank_patches) - self.blank_patches
        part = more / max(1, self.largest_patches - self.blank_patches)

        def at(low: int, high: int) -> int:
            return round(low + (high - low) * part)

        low, high = self.blank, self.largest
        return Cost(
            kept=at(low.kept, high.kept),
            forward=at(low.forward, high.forward),
            backward=at(low.backward, high.backward),
        )


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoder on one rank, and the units of a step.

    ``merge`` patches make a visual token; ``payload`` and ``pixels`` are the bytes of a token's
    features and of a patch; ``blank_pixels`` those that the backward of a unit without images
    keeps.
    """

    edge: Edge
    rank: int
    units: Sequence[UnitSize]
    encoder_replicas: tuple[int, ...]
    merge: int
    costs: UnitCosts
    payload: int
    pixels: int
    blank_pixels: int
    copies_shards: bool  # a shard is of several pieces, which are put together to travel

    def cost(self, unit: int | None) -> Cost:
        """In the encoder; without images that of the blank one, whose pixels are its own."""
        patches = self.patches(unit)
        cost = self.costs.of(patches)
        return cost if patches else replace(cost, kept=cost.kept + self.blank_pixels)

    def patches(self, unit: int | None) -> int:
        """Of all images of a unit; None stands for one without any."""
        return 0 if unit is None else self.units[unit].patches

    def features(self, unit: int | None) -> int:
        """Bytes of all of a unit's features; one without images has no rows."""
        return self.patches(unit) // self.merge * self.payload

    def consumed(self, unit: int) -> int:
        """Bytes of those that this rank's decoder takes."""
        shards = self.units[unit].shards
        if self.rank not in self.edge.consumers:
            return 0
        if shards is None:
            return self.features(unit)
        return shards[self.edge.consumers.index(self.rank)] * self.payload

    def moved(
        self, transfers: Callable[..., Sequence[Transfer]], members: range
    ) -> tuple[int, int]:
        """Bytes that an exchange of these units sends from here, and those that come here."""
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
        return sent, received

    def mine(self, members: range) -> list[int]:
        """Those of these units that this rank encodes."""
        replica = self.edge.replica_of(self.rank)
        return [unit for unit in members if self.encoder_replicas[unit] == replica]

    def gathered(self, members: range, *, copied: bool) -> int:
        """The most that it takes to bring these units' features here, beside their own payloads.

        What arrives is one piece of memory, what leaves another. With ``copied``, each unit's
        features then get memory of their own, but for whole payloads.
        """
        sent, received = self.moved(feature_transfers, members)
        shards = sum(self.consumed(unit) for unit in self.mine(members)) if self.sharded else 0
        taken = sent + shards if self.copies_shards else 0
        return received + max(sent + taken, received + shards if copied else 0)

    def scattered(self, members: range) -> int:
        """The most that it takes to bring these units' gradients to the ranks that encoded them."""
        sent, received = self.moved(gradient_transfers, members)
        whole = sum(self.features(unit) for unit in self.mine(members)) if self.sharded else 0
        return received + max(sent, whole)

    @property
    def sharded(self) -> bool:
        """Whether each consumer takes a part of the features only."""
        return self.units[0].shards is not None


class EncoderSide:
    """Adds up what a step's plan has in memory for the encoder, around the decoder's passes.

    ``away`` is what of the encoder's state leaves the device with it, by its name in the ledger.
    """

    def __init__(self, plan: StepPlan, encoding: Encoding, *, away: Mapping[str, int]) -> None:
        self._plan = plan
        self._of = encoding
        self._away = away
        self._own_pixels = encoding.pixels * sum(
            encoding.patches(each.unit)
            for operations in plan.values()
            for each in operations
            if isinstance(each, Encode)
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
                cost = of.cost(unit)
                ledger.add(ENCODER, cost.kept)
                ledger.work("encoder's forward", cost.forward - cost.kept)
                ledger.add(FEATURES, of.features(unit))
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
                cost = of.cost(unit)
                ledger.work("encoder's backward", held + cost.backward)
                ledger.take(ENCODER, cost.kept)
                ledger.take(FEATURE_GRADIENTS, of.features(unit))
            case Release(what=what, units=units) | Reload(what=what, units=units):
                enter = ledger.take if isinstance(operation, Release) else ledger.add
                for name, nbytes in self._moved(what, units):
                    enter(name, nbytes)
            case EncodeInForward() | Offload() | Await():
                pass  # traced with the decoder; memory changes with Release and Reload

    def _moved(self, what: Kept, units: tuple[int, ...]) -> list[tuple[str, int]]:
        of = self._of
        match what:
            case Kept.STATE:
                return list(self._away.items())
            case Kept.ACTIVATIONS:
                return [(ENCODER, of.cost(unit).kept) for unit in units]
            case Kept.FEATURES:
                return [(FEATURES, of.consumed(unit)) for unit in units]
            case Kept.GRADIENTS:
                return [(FEATURE_GRADIENTS, of.consumed(unit)) for unit in units]
