"""What of a step leaves for the host and comes back, as the plan's operations say."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from loongplug.hetero.encoder_state import EncoderState, movable_saves
from loongplug.hetero.executed_step import ExecutedStep
from loongplug.hetero.operations import Kept, To
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
        return movable_saves(device=self._device, stays=step.stays)

    def move(self, to: To, what: Kept, pieces: tuple[int, ...], step: ExecutedStep) -> None:
        """What leaves is the ``step``'s, and what comes back is it again."""
        match to:
            case To.LEAVE:
                self.queue.leave(self._leaving(what, pieces, step))
            case To.FREE:
                self.queue.let_go(*_names(what, pieces))
            case To.RETURN:
                self.queue.send_for(*_names(what, pieces))
            case To.HERE:
                self._arrives(what, pieces, step)

    def features_leave(self, features: dict[int, Tensor]) -> None:
        """They are on the host alone, by piece."""
        lots: dict[Hashable, Sequence[Movable]] = {
            (Kept.FEATURES, piece): [self._movable(each)] for piece, each in features.items()
        }
        self.queue.leave(lots)
        features.clear()
        self.queue.let_go(*lots)

    def _leaving(
        self, what: Kept, pieces: tuple[int, ...], step: ExecutedStep
    ) -> Mapping[Hashable, Sequence[Movable]]:
        match what:
            case Kept.STATE:
                assert self.state is not None
                return dict.fromkeys(_names(what, pieces), self.state.movable())
            case Kept.ACTIVATIONS:
                return {(what, piece): step.saved.pop(piece) for piece in pieces}
            case Kept.GRADIENTS:
                return {(what, each): [self._movable(step.gradients.pop(each))] for each in pieces}
            case Kept.FEATURES:
                raise AssertionError("they leave when they are gathered")

    def _arrives(self, what: Kept, pieces: tuple[int, ...], step: ExecutedStep) -> None:
        """Nothing here holds activations."""
        arriving = {Kept.FEATURES: step.features, Kept.GRADIENTS: step.gradients}
        taken = self.queue.take(*_names(what, pieces))
        for piece in pieces if what in arriving else ():
            (found,) = taken[what, piece]
            assert found.device is not None
            arriving[what][piece] = found.device

    def _movable(self, tensor: Tensor) -> Movable:
        return Movable(device=tensor, where=self._device)


def _names(what: Kept, pieces: tuple[int, ...]) -> list[Hashable]:
    """As the queue knows them; the encoder's state is of no piece."""
    return [(what, piece) for piece in pieces or (None,)]
