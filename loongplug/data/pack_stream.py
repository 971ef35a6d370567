"""The packs of a stream of samples."""

from collections.abc import Iterator

from loongplug.data.dataset import Sample
from loongplug.data.packing import PackingState, PackPlanner


class PackStream(Iterator[list[Sample]]):
    """Pack after pack, each with its samples; the same on every rank that reads the same samples.

    A rank that trains on some of the packs still takes the lengths of all. At most the planner's
    look-ahead of samples is kept. No collectives.
    """

    def __init__(self, samples: Iterator[Sample], planner: PackPlanner) -> None:
        """``samples`` are those that ``planner`` holds back already, by position, and then those
        from ``planner.read`` on.
        """
        self._samples = samples
        self._planner = planner
        self._held = {position: next(samples) for position, _ in planner.state.held}
        self.given = 0  # packs so far

    @property
    def state(self) -> PackingState:
        """The planner's, for a stream that begins with the next pack."""
        return self._planner.state

    def __next__(self) -> list[Sample]:
        """The next pack. Ends, when the samples do, with what is left of them in packs."""
        ended = False
        while (pack := self._planner.next_pack(ended=ended)) is None:
            if ended:
                raise StopIteration
            sample = next(self._samples, None)
            ended = sample is None
            if sample is not None:
                self._held[self._planner.read] = sample
                self._planner.add(len(sample.input_ids))
        self.given += 1
        return [self._held.pop(position) for position in pack]
