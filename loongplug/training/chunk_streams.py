"""One rank's microbatches for each of its virtual chunks, made once."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from loongplug.data.microbatch import Microbatch, TextNeeds


class ChunkStreams:
    """The same endless microbatches for every virtual chunk of a rank.

    The schedule runs chunks at different times; what the others have yet to ask for is kept for
    them, at most the microbatches of one step. Each gets the text that it consumes (``needs`` by
    chunk, of which the source has all), and only the first the vision part.
    """

    def __init__(self, source: Iterator[Microbatch], *, needs: Sequence[TextNeeds]) -> None:
        self._source = source
        self._needs = tuple(needs)
        self._waiting: list[deque[Microbatch]] = [deque() for _ in needs]

    def chunk(self, index: int) -> Iterator[Microbatch]:
        """The microbatches as this chunk sees them."""
        waiting = self._waiting[index]
        while True:
            if not waiting:
                microbatch = next(self._source)
                for number, needs in enumerate(self._needs):
                    own = microbatch.only(needs)
                    self._waiting[number].append(replace(own, vision=None) if number else own)
            yield waiting.popleft()
