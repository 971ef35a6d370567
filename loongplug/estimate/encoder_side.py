"""What a mode's timing has in memory for the encoder, around the decoder's passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from loongplug.estimate.ledger import FEATURE_GRADIENTS, FEATURES, Ledger
from loongplug.estimate.trace import ENCODER, Cost
from loongplug.estimate.units import UnitSize
from loongplug.hetero.group_ahead import GroupAhead
from loongplug.hetero.modes import Mode
from loongplug.hetero.placement import Placement
from loongplug.hetero.routes import Transfer, feature_transfers, gradient_transfers
from loongplug.hetero.three_phases import ThreePhases

PIXELS = "pixels"
_SMALLEST = 1  # blocks of patches in the blank image


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoder on one rank, and the units of a step.

    ``cost`` is that of a unit of ``traced`` patches; one of another size takes its share of it.
    ``payload`` and ``pixels`` are the bytes of a visual token's features and of a patch.
    """

    placement: Placement
    rank: int
    group: int | None
    units: Sequence[UnitSize]
    owners: tuple[int, ...]
    merge: int
    cost: Cost
    traced: int
    payload: int
    pixels: int
    trains: bool
    copies_shares: bool  # a share is of several rows, so that it is no view

    def of_unit(self, patches: int) -> Cost:
        """Of a unit of so many; without images, of the blank one."""
        share = max(patches, _SMALLEST * self.merge) / self.traced
        return Cost(
            encoder=round(self.cost.encoder * share),
            forward=round(self.cost.forward * share),
            backward=round(self.cost.backward * share),
        )

    def features(self, unit: int) -> int:
        """Bytes of all of a unit's features."""
        return self.units[unit].patches // self.merge * self.payload

    def consumed(self, unit: int) -> int:
        """Bytes of those that this rank's decoder takes."""
        shares = self.units[unit].shares
        if self.rank not in self.placement.consumers:
            return 0
        if shares is None:
            return self.features(unit)
        return shares[self.placement.consumers.index(self.rank)] * self.payload

    def moved(self, transfers: Sequence[Transfer]) -> "Moved":
        """What an exchange of these sends from here, and what comes here."""
        sent = received = 0
        for each in transfers:
            shares = self.units[each.unit].shares
            nbytes = self.features(each.unit)
            if each.share is not None and shares is not None:
                nbytes = shares[each.share] * self.payload
            if each.source == each.target:
                continue
            sent += nbytes if each.source == self.rank else 0
            received += nbytes if each.target == self.rank else 0
        return Moved(sent=sent, received=received)

    @property
    def shared(self) -> bool:
        """Whether each consumer takes a part of the features only."""
        return self.units[0].shares is not None


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of an exchange, seen from one rank."""

    sent: int
    received: int


class Side(Protocol):
    """What happens to the encoder in a step; every method changes the ledger."""

    def begin(self, ledger: Ledger) -> None:
        """Before the schedule."""
        ...

    def forward(self, ledger: Ledger, unit: int) -> None:
        """Before the first chunk's forward of a microbatch."""
        ...

    def backward(self, ledger: Ledger, unit: int) -> None:
        """Behind the first chunk's backward of a microbatch."""
        ...

    def end(self, ledger: Ledger) -> None:
        """Behind the schedule."""
        ...


class NoSide:
    """The encoder works within the first chunk's passes, or is not on this rank."""

    def begin(self, ledger: Ledger) -> None:
        """Nothing."""

    def forward(self, ledger: Ledger, unit: int) -> None:
        """Nothing."""

    def backward(self, ledger: Ledger, unit: int) -> None:
        """Nothing."""

    def end(self, ledger: Ledger) -> None:
        """Nothing."""


class Separated:
    """Full separation: as :class:`~loongplug.hetero.three_phases.ThreePhases`.

    With ``features_on_host`` and ``activations_on_host`` two units' are on the device. ``away`` is
    what of the encoder's state is not there in phase 2, by its name.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        features_on_host: bool = False,
        activations_on_host: bool = False,
        away: Mapping[str, int] | None = None,
    ) -> None:
        self._of = encoding
        self._mine = [unit for unit, owner in enumerate(encoding.owners) if owner == encoding.group]
        self._features_on_host = features_on_host
        self._activations_on_host = activations_on_host
        self._away = away or {}

    def begin(self, ledger: Ledger) -> None:
        """Phase 1: all units are encoded, then exchanged."""
        of = self._of
        patches = [of.units[unit].patches for unit in self._mine]
        if not patches and of.trains:
            patches = [0]
        ledger.add(PIXELS, sum(patches) * of.pixels)
        for number, each in enumerate(patches):
            cost = of.of_unit(each)
            if self._activations_on_host and number > 1:
                ledger.take(ENCODER, of.of_unit(patches[number - 2]).encoder)
            ledger.add(ENCODER, cost.encoder)
            ledger.work("phase 1", cost.forward - cost.encoder)
            ledger.add(FEATURES, each // of.merge * of.payload)
        if self._activations_on_host:
            ledger.clear(ENCODER)
        moved = of.moved(feature_transfers(of.placement, of.owners, shared=of.shared))
        ledger.work("exchange of features", moved.sent + moved.received)
        ledger.clear(FEATURES)
        if self._features_on_host:
            ledger.add(FEATURES, self._two_units())
        else:
            ledger.add(FEATURES, sum(of.consumed(unit) for unit in range(len(of.units))))
        for name, nbytes in self._away.items():
            ledger.take(name, nbytes)

    def forward(self, ledger: Ledger, unit: int) -> None:
        """The features are there."""

    def backward(self, ledger: Ledger, unit: int) -> None:
        """The decoder has left its gradient."""
        of = self._of
        if of.trains:
            ledger.add(FEATURE_GRADIENTS, of.consumed(unit))
            most = self._two_units()
            if self._features_on_host and ledger.live[FEATURE_GRADIENTS] > most:
                ledger.take(FEATURE_GRADIENTS, ledger.live[FEATURE_GRADIENTS] - most)

    def end(self, ledger: Ledger) -> None:
        """Phase 3: gradients are exchanged, then all units go backward."""
        of = self._of
        for name, nbytes in self._away.items():
            ledger.add(name, nbytes)
        if of.trains:
            ledger.clear(FEATURE_GRADIENTS)
            every = sum(of.consumed(unit) for unit in range(len(of.units)))
            ledger.add(FEATURE_GRADIENTS, every)
            moved = of.moved(gradient_transfers(of.placement, of.owners, shared=of.shared))
            ledger.work("exchange of gradients", moved.sent + moved.received)
            ledger.clear(FEATURE_GRADIENTS)
            ledger.clear(FEATURES)
            ledger.add(FEATURE_GRADIENTS, sum(of.features(unit) for unit in self._mine))
            self._backward(ledger)
        for name in (ENCODER, FEATURES, FEATURE_GRADIENTS, PIXELS):
            ledger.clear(name)

    def _backward(self, ledger: Ledger) -> None:
        of = self._of
        costs = [of.of_unit(of.units[unit].patches) for unit in self._mine]
        if self._activations_on_host:
            ledger.clear(ENCODER)
            ledger.add(ENCODER, sum(cost.encoder for cost in costs[:1]))
        for number, (unit, cost) in enumerate(zip(self._mine, costs, strict=True)):
            if self._activations_on_host:
                ledger.add(ENCODER, sum(each.encoder for each in costs[number + 1 : number + 2]))
            ledger.work("phase 3", cost.backward)
            ledger.take(ENCODER, cost.encoder)
            ledger.take(FEATURE_GRADIENTS, of.features(unit))

    def _two_units(self) -> int:
        """The most features of two units that follow each other."""
        sizes = [self._of.consumed(unit) for unit in range(len(self._of.units))]
        return max((sum(pair) for pair in pairwise(sizes)), default=sum(sizes))


class Ahead:
    """Heterogeneous DP: as :class:`~loongplug.hetero.group_ahead.GroupAhead`."""

    def __init__(self, encoding: Encoding) -> None:
        self._of = encoding
        self._size = len(encoding.placement.groups)
        self._pending: dict[int, int] = {}  # by group, the passes that are left

    def begin(self, ledger: Ledger) -> None:
        """The pixels of the units that this rank will encode."""
        of = self._of
        if of.group is None:
            return
        own = [
            unit.patches
            for unit, owner in zip(of.units, of.owners, strict=True)
            if owner == of.group
        ]
        ledger.add(PIXELS, sum(own) * of.pixels)

    def forward(self, ledger: Ledger, unit: int) -> None:
        """The first of a group has it encoded and exchanged."""
        of, number = self._of, unit // self._size
        if of.group is None:
            return
        if number not in self._pending:
            members = self._members(number)
            self._pending[number] = len(members)
            cost = of.of_unit(self._own_patches(number))
            ledger.add(ENCODER, cost.encoder)
            ledger.work("encoding of a group", cost.forward - cost.encoder)
            moved, kept = self._features(number)
            ledger.work("exchange of features", moved.sent + kept)
            ledger.add(FEATURES, kept)
        if not of.trains:
            self._passed(ledger, number)

    def backward(self, ledger: Ledger, unit: int) -> None:
        """The last of a group has the encoder go backward."""
        of, number = self._of, unit // self._size
        if of.group is None or not of.trains:
            return
        ledger.add(FEATURE_GRADIENTS, of.consumed(unit))
        self._passed(ledger, number)

    def end(self, ledger: Ledger) -> None:
        """All groups have gone."""
        ledger.clear(PIXELS)

    def _passed(self, ledger: Ledger, number: int) -> None:
        self._pending[number] -= 1
        if self._pending[number]:
            return
        of, members = self._of, self._members(number)
        cost = of.of_unit(self._own_patches(number))
        if of.trains:
            owners = tuple(of.owners[unit] for unit in members)
            transfers = [
                _shifted(each, by=members[0])
                for each in gradient_transfers(of.placement, owners, shared=of.shared)
            ]
            moved = of.moved(transfers)
            whole = self._own_patches(number) // of.merge * of.payload
            ledger.work("exchange of gradients", moved.sent + moved.received + whole)
            ledger.work("encoder's backward", whole * (2 if of.shared else 1) + cost.backward)
            ledger.take(FEATURE_GRADIENTS, sum(of.consumed(unit) for unit in members))
        ledger.take(ENCODER, cost.encoder)
        ledger.take(FEATURES, self._features(number)[1])
        del self._pending[number]

    def _members(self, number: int) -> range:
        first = number * self._size
        return range(first, min(first + self._size, len(self._of.units)))

    def _own_patches(self, number: int) -> int:
        of = self._of
        return sum(
            of.units[unit].patches for unit in self._members(number) if of.owners[unit] == of.group
        )

    def _features(self, number: int) -> tuple[Moved, int]:
        """What an exchange sends, and what stays of it and of the rank's own unit."""
        of, members = self._of, self._members(number)
        owners = tuple(of.owners[unit] for unit in members)
        transfers = [
            _shifted(each, by=members[0])
            for each in feature_transfers(of.placement, owners, shared=of.shared)
        ]
        moved = of.moved(transfers)
        own = self._own_patches(number) // of.merge * of.payload
        copied = 0
        if of.copies_shares:
            copied = sum(of.consumed(unit) for unit in members if of.owners[unit] == of.group)
        return moved, own + moved.received + copied


def _shifted(transfer: Transfer, *, by: int) -> Transfer:
    """Of a unit counted within a group, as one of the step."""
    return Transfer(
        unit=transfer.unit + by,
        source=transfer.source,
        target=transfer.target,
        share=transfer.share,
    )


def side_of(mode: Mode, encoding: Encoding, *, state: Mapping[str, int]) -> Side:
    """What goes with a mode's timing; ``state`` is what the encoder holds between steps."""
    timing = mode.timing
    options: dict[str, Any] = {}
    if isinstance(timing, partial):
        options = dict(timing.keywords)
        timing = timing.func
    if timing is ThreePhases:
        return Separated(encoding, **options, away=state if mode.state_away else None)
    assert timing is GroupAhead, timing
    return Ahead(encoding)
