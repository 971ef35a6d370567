"""What of a step leaves for the host and comes back, as the plan's operations say."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from loongplug.hetero.encoder_state import EncoderState, movable_saves
from loongplug.hetero.executed_step import ExecutedStep
from loongplug.hetero.operations import Await, Kept, Offload, Release, Reload
from loongplug.platform import Platform
from loongplug.platform.prefetch import Movable, PrefetchQueue


class HostMoves:
    """One rank's, for one encoder and a run: the queue of all that moves."""

    def __init__(self, platform: Platform) -> None:
        self._device = platform.device
        self.queue = PrefetchQueue(platform.copies())
        self.state: EncoderState | None = None  # where it leaves for the host

    def saves(
        self, step: ExecutedStep, *, movable: bool
    ) -> AbstractContextManager[dict[int, Movable] | None]:
        """Inside, something is encoded; what its backward needs is given where it is ``movable``.

        Weights and media are not among that.
        """
        if not movable:
            return nullcontext()
        return movable_saves(device=self._device, stays=step.weights | step.media)

    def operate(self, operation: Offload | Release | Reload | Await, step: ExecutedStep) -> None:
        """One of those; what leaves is the ``step``'s, and what comes back is it again."""
        what, units = operation.what, operation.units
        match operation:
            case Offload():
                self.queue.leave(self._leaving(what, units, step))
            case Release():
                self.queue.let_go(*_names(what, units))
            case Reload():
                self.queue.send_for(*_names(what, units))
            case Await():
                self._arrives(what, units, step)

    def features_leave(self, features: dict[int, Tensor]) -> None:
        """They are on the host alone, by unit."""
        lots: dict[Hashable, Sequence[Movable]] = {
            (Kept.FEATURES, unit): [self._movable(each)] for unit, each in features.items()
        }
        self.queue.leave(lots)
        features.clear()
        self.queue.let_go(*lots)

    def _leaving(
        self, what: Kept, units: tuple[int, ...], step: ExecutedStep
    ) -> Mapping[Hashable, Sequence[Movable]]:
        match what:
            case Kept.STATE:
                assert self.state is not None
                return dict.fromkeys(_names(what, units), self.state.movable())
            case Kept.ACTIVATIONS:
                return {(what, unit): step.saved.pop(unit) for unit in units}
            case Kept.GRADIENTS:
                return {(what, unit): [self._movable(step.gradients.pop(unit))] for unit in units}
            case Kept.FEATURES:
                raise AssertionError("they leave when they are gathered")

    def _arrives(self, what: Kept, units: tuple[int, ...], step: ExecutedStep) -> None:
        """Nothing here holds activations."""
        arriving = {Kept.FEATURES: step.features, Kept.GRADIENTS: step.gradients}
        taken = self.queue.take(*_names(what, units))
        for unit in units if what in arriving else ():
            (found,) = taken[what, unit]
            assert found.device is not None
            arriving[what][unit] = found.device

    def _movable(self, tensor: Tensor) -> Movable:
        return Movable(device=tensor, where=self._device)


def _names(what: Kept, units: tuple[int, ...]) -> list[Hashable]:
    """As the queue knows them; the encoder's state is of no unit."""
    return [(what, unit) for unit in units or (None,)]
