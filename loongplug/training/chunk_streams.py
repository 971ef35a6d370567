"""One rank's microbatches for each of its virtual chunks, made once."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from loongplug.data.microbatch import Microbatch


class ChunkStreams:
    """The same endless microbatches for every virtual chunk of a rank.

    The schedule runs chunks at different times; what the others have yet to ask for is kept for
    them, at most the microbatches of one step. Only the first chunk gets the vision part.
    """

    def __init__(self, source: Iterator[Microbatch], *, chunks: int) -> None:
        self._source = source
        self._waiting: list[deque[Microbatch]] = [deque() for _ in range(chunks)]

    def chunk(self, index: int) -> Iterator[Microbatch]:
        """The microbatches as this chunk sees them."""
        waiting = self._waiting[index]
        while True:
            if not waiting:
                microbatch = next(self._source)
                text = replace(microbatch, vision=None)
                for number, others in enumerate(self._waiting):
                    others.append(text if number else microbatch)
            yield waiting.popleft()
