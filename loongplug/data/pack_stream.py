"""The packs of a stream of samples, by number."""

from collections.abc import Callable

from loongplug.data.dataset import Sample
from loongplug.data.packing import PackPlanner


class PackStream:
    """Endless packs, the same on every rank, whatever part of them it trains on.

    The stream is planned from its first sample on: a pack in the middle takes the lengths, and so
    the text, of all samples before it. At most ``look_ahead`` samples are kept. No collectives.
    """

    def __init__(
        self, sample_at: Callable[[int], Sample], *, seq_length: int, look_ahead: int
    ) -> None:
        """``sample_at`` gives the sample at a position of the stream."""
        self._sample_at = sample_at
        self._seq_length = seq_length
        self._look_ahead = look_ahead
        self._restart()

    def pack(self, number: int) -> list[Sample]:
        """Pack ``number``, counted from 0; going back plans the stream anew."""
        if number < self._next:
            self._restart()
        while self._next < number:
            self._plan()
        return self._plan()

    def _restart(self) -> None:
        self._next = 0
        self._planner = PackPlanner(seq_length=self._seq_length, look_ahead=self._look_ahead)
        self._held: dict[int, Sample] = {}

    def _plan(self) -> list[Sample]:
        while (pack := self._planner.next_pack()) is None:
            position = self._planner.read
            sample = self._sample_at(position)
            self._planner.add(len(sample.input_ids))
            self._held[position] = sample
        self._next += 1
        return [self._held.pop(position) for position in pack]
