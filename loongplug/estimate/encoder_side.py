"""What a mode's timing has in memory for the encoder, around the decoder's passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from loongplug.estimate.ledger import FEATURE_GRADIENTS, FEATURES, Ledger
from loongplug.estimate.trace import ENCODER, Cost
from loongplug.estimate.units import UnitSize
from loongplug.hetero.group_ahead import GroupAhead
from loongplug.hetero.modes import Mode
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import Transfer, feature_transfers, gradient_transfers
from loongplug.hetero.three_phases import ThreePhases

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
    group: int | None
    units: Sequence[UnitSize]
    owners: tuple[int, ...]
    merge: int
    cost: Cost
    blank: Cost
    traced: int
    payload: int
    pixels: int
    blank_pixels: int
    trains: bool
    copies_shares: bool  # a share is of several pieces, which are put together to travel

    def of_unit(self, patches: int) -> Cost:
        """Of a unit of so many; without images, of the blank one, whose pixels are its own."""
        cost = between(self.blank, self.cost, patches, smallest=self.merge, largest=self.traced)
        return cost if patches else replace(cost, encoder=cost.encoder + self.blank_pixels)

    def features(self, unit: int) -> int:
        """Bytes of all of a unit's features."""
        return self.units[unit].patches // self.merge * self.payload

    def consumed(self, unit: int) -> int:
        """Bytes of those that this rank's decoder takes."""
        shares = self.units[unit].shares
        if self.rank not in self.edge.consumers:
            return 0
        if shares is None:
            return self.features(unit)
        return shares[self.edge.consumers.index(self.rank)] * self.payload

    def moved(self, transfers: Callable[..., Sequence[Transfer]], members: range) -> "Moved":
        """What an exchange of these units sends from here, and what comes here."""
        owners = self.owners[members.start : members.stop]
        sent = received = 0
        for each in transfers(self.edge, owners, shared=self.shared):
            unit = members.start + each.unit  # transfers count units from 0
            shares = self.units[unit].shares
            nbytes = self.features(unit)
            if each.share is not None and shares is not None:
                nbytes = shares[each.share] * self.payload
            if each.source == each.target:
                continue
            sent += nbytes if each.source == self.rank else 0
            received += nbytes if each.target == self.rank else 0
        return Moved(sent=sent, received=received)

    def mine(self, members: range) -> list[int]:
        """Those of these units that this rank encodes."""
        return [unit for unit in members if self.owners[unit] == self.group]

    def gathered(self, members: range, *, copied: bool) -> int:
        """The most that it takes to bring these units' features here, beside their own payloads.

        What arrives is one piece of memory, what leaves another. With ``copied``, each unit's
        features then get memory of their own, but for whole payloads.
        """
        moved = self.moved(feature_transfers, members)
        shares = sum(self.consumed(unit) for unit in self.mine(members)) if self.shared else 0
        taken = moved.sent + shares if self.copies_shares else 0
        return moved.received + max(moved.sent + taken, moved.received + shares if copied else 0)

    def scattered(self, members: range) -> int:
        """The most that it takes to bring these units' gradients to their owners."""
        moved = self.moved(gradient_transfers, members)
        whole = sum(self.features(unit) for unit in self.mine(members)) if self.shared else 0
        return moved.received + max(moved.sent, whole)

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

    def before_backward(self, ledger: Ledger, unit: int) -> None:
        """Before the first chunk's backward of a microbatch."""
        ...

    def backward(self, ledger: Ledger, unit: int) -> None:
        """Behind it."""
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

    def before_backward(self, ledger: Ledger, unit: int) -> None:
        """Nothing."""

    def backward(self, ledger: Ledger, unit: int) -> None:
        """Nothing."""

    def end(self, ledger: Ledger) -> None:
        """Nothing."""


class Separated:
    """Full separation: as :class:`~loongplug.hetero.three_phases.ThreePhases`.

    With ``features_on_host`` and ``activations_on_host`` two units' are on the device. ``away`` is
    what of the encoder's state is not there in phase 2, by its name; ``beside`` as that of
    :class:`~loongplug.hetero.encoder_state.StateAway`.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        features_on_host: bool = False,
        activations_on_host: bool = False,
        away: Mapping[str, int] | None = None,
        beside: bool = False,
    ) -> None:
        self._of = encoding
        self._all = range(len(encoding.units))
        self._mine = encoding.mine(self._all)
        self._features_on_host = features_on_host
        self._activations_on_host = activations_on_host
        self._away = away or {}
        self._beside = beside and len(self._all) > 1

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
        if self._activations_on_host and self._mine:
            ledger.clear(ENCODER)
        on_host = self._features_on_host
        ledger.work("exchange of features", of.gathered(self._all, copied=not on_host))
        ledger.clear(FEATURES)
        there = self._all[:1] if on_host else self._all
        ledger.add(FEATURES, sum(of.consumed(unit) for unit in there))
        if not self._beside:
            self._leaves(ledger)

    def forward(self, ledger: Ledger, unit: int) -> None:
        """Its features are used up before the forward has all that it leaves; more come."""
        of = self._of
        if unit == 1 and self._beside:
            self._leaves(ledger)
        if self._features_on_host and unit + 1 in self._all:
            ledger.add(FEATURES, of.consumed(unit + 1))
        ledger.take(FEATURES, of.consumed(unit))

    def before_backward(self, ledger: Ledger, unit: int) -> None:
        """With the last one, the state comes back."""
        if unit == self._all[-1] and self._beside:
            self._comes_back(ledger)

    def backward(self, ledger: Ledger, unit: int) -> None:
        """The decoder has left its gradient; on the host, the one before has left."""
        of = self._of
        if not of.trains:
            return
        ledger.add(FEATURE_GRADIENTS, of.consumed(unit))
        if self._features_on_host and unit > 0:
            ledger.take(FEATURE_GRADIENTS, of.consumed(unit - 1))

    def end(self, ledger: Ledger) -> None:
        """Phase 3: gradients are exchanged, then all units go backward."""
        of = self._of
        if not self._beside:
            self._comes_back(ledger)
        if of.trains:
            ledger.clear(FEATURE_GRADIENTS)
            ledger.add(FEATURE_GRADIENTS, sum(of.consumed(unit) for unit in self._all))
            ledger.work("exchange of gradients", of.scattered(self._all))
            ledger.clear(FEATURE_GRADIENTS)
            ledger.add(FEATURE_GRADIENTS, sum(of.features(unit) for unit in self._mine))
            self._backward(ledger)
        for name in (ENCODER, FEATURE_GRADIENTS, PIXELS):
            ledger.clear(name)

    def _leaves(self, ledger: Ledger) -> None:
        for name, nbytes in self._away.items():
            ledger.take(name, nbytes)

    def _comes_back(self, ledger: Ledger) -> None:
        for name, nbytes in self._away.items():
            ledger.add(name, nbytes)

    def _backward(self, ledger: Ledger) -> None:
        of = self._of
        costs = [of.of_unit(of.units[unit].patches) for unit in self._mine]
        if self._activations_on_host and costs:
            ledger.clear(ENCODER)
            ledger.add(ENCODER, sum(cost.encoder for cost in costs[:1]))
        for number, (unit, cost) in enumerate(zip(self._mine, costs, strict=True)):
            if self._activations_on_host:
                ledger.add(ENCODER, sum(each.encoder for each in costs[number + 1 : number + 2]))
            ledger.work("phase 3", cost.backward)
            ledger.take(ENCODER, cost.encoder)
            ledger.take(FEATURE_GRADIENTS, of.features(unit))


class Ahead:
    """Heterogeneous DP: as :class:`~loongplug.hetero.group_ahead.GroupAhead`."""

    def __init__(self, encoding: Encoding) -> None:
        self._of = encoding
        self._size = len(encoding.edge.replicas)
        self._pending: dict[int, int] = {}  # by group, the passes that are left

    def begin(self, ledger: Ledger) -> None:
        """The pixels of the units that this rank will encode."""
        of = self._of
        if of.group is None:
            return
        own = [of.units[unit].patches for unit in of.mine(range(len(of.units)))]
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
            own = self._own_patches(number) // of.merge * of.payload
            ledger.work("exchange of features", own + of.gathered(members, copied=True))
            ledger.add(FEATURES, sum(of.consumed(member) for member in members))
        # Used up before the forward has all that it leaves.
        ledger.take(FEATURES, of.consumed(unit))
        if not of.trains:
            self._passed(ledger, unit)

    def before_backward(self, ledger: Ledger, unit: int) -> None:
        """Nothing."""

    def backward(self, ledger: Ledger, unit: int) -> None:
        """The last of a group has the encoder go backward."""
        of = self._of
        if of.group is None or not of.trains:
            return
        ledger.add(FEATURE_GRADIENTS, of.consumed(unit))
        self._passed(ledger, unit)

    def end(self, ledger: Ledger) -> None:
        """All groups have gone."""
        ledger.clear(PIXELS)

    def _passed(self, ledger: Ledger, unit: int) -> None:
        of, number = self._of, unit // self._size
        self._pending[number] -= 1
        if self._pending[number]:
            return
        members = self._members(number)
        cost = of.of_unit(self._own_patches(number))
        if of.trains:
            whole = self._own_patches(number) // of.merge * of.payload
            ledger.work("exchange of gradients", of.scattered(members))
            ledger.take(FEATURE_GRADIENTS, sum(of.consumed(member) for member in members))
            # The decoder's backward, within which this happens, holds its last gradient.
            ledger.work("encoder's backward", of.consumed(unit) + whole + cost.backward)
        ledger.take(ENCODER, cost.encoder)
        del self._pending[number]

    def _members(self, number: int) -> range:
        first = number * self._size
        return range(first, min(first + self._size, len(self._of.units)))

    def _own_patches(self, number: int) -> int:
        of = self._of
        return sum(of.units[unit].patches for unit in of.mine(self._members(number)))


def side_of(mode: Mode, encoding: Encoding, *, state: Mapping[str, int], last_stage: bool) -> Side:
    """What goes with a mode's timing; ``state`` is what the encoder holds between steps."""
    timing: Any = mode.timing
    options: dict[str, Any] = {}
    if isinstance(timing, partial):
        timing, options = timing.func, dict(timing.keywords)
    if timing is ThreePhases:
        away = state if mode.offload_state else None
        return Separated(encoding, **options, away=away, beside=not last_stage)
    assert timing is GroupAhead, timing
    return Ahead(encoding)
