"""The text parts of a data parallel rank's microbatches, in the order of the run."""

from collections.abc import Iterator
from itertools import count, islice

from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.order import SampleOrder, microbatch_positions
from loongplug.data.pack_stream import PackStream
from loongplug.data.packing import PackPlanner
from loongplug.data.workers import Background, WorkerSettings

# Where packs are planned: samples per piece of work of a background process.
_CHUNK = 16


class PaddedTexts(Iterator[list[Sample]]):
    """The samples of one microbatch after the other, each in a row of its own.

    Arguments as of :class:`~loongplug.data.loader.MicrobatchLoader`. No collectives.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        consumed_samples: int,
        restart_after: int | None,
        workers: WorkerSettings,
    ) -> None:
        order = SampleOrder(len(dataset), seed=seed, restart_after=restart_after)
        indices = (
            order.indices(
                microbatch_positions(
                    consumed, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size
                )
            )
            for consumed in count(consumed_samples, micro_batch_size * dp_size)
        )
        self._parts = Background(dataset.text_parts, indices, settings=workers)

    def __next__(self) -> list[Sample]:
        """The next microbatch's samples."""
        return next(self._parts)

    def close(self) -> None:
        """End the background processes."""
        self._parts.close()


class PackedTexts(Iterator[list[Sample]]):
    """The samples of one pack after the other; a microbatch is a pack.

    All ranks plan all packs, so that every rank reads the text of all samples, whichever packs it
    trains on. The stream is planned from its first sample on. No collectives.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        look_ahead: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        consumed_packs: int,
        restart_after: int | None,
        workers: WorkerSettings,
    ) -> None:
        """``restart_after`` is in packs."""
        self._dataset = dataset
        self._look_ahead = look_ahead
        self._order = SampleOrder(len(dataset), seed=seed)
        self._numbers = count(consumed_packs + dp_rank, dp_size)
        self._restart_after = restart_after
        self._workers = workers
        self._start()

    def __next__(self) -> list[Sample]:
        """The samples of this rank's next pack."""
        number = next(self._numbers)
        if self._restart_after is not None:
            number %= self._restart_after
        if number < self._packs.given:
            self.close()
            self._start()
        while self._packs.given < number:
            next(self._packs)
        return next(self._packs)

    def close(self) -> None:
        """End the background processes."""
        self._parts.close()

    def _start(self) -> None:
        self._parts = Background(self._dataset.text_parts, self._chunks(), settings=self._workers)
        samples = (sample for part in self._parts for sample in part)
        planner = PackPlanner(seq_length=self._dataset.seq_length, look_ahead=self._look_ahead)
        self._packs = PackStream(samples, planner)

    def _chunks(self) -> Iterator[list[int]]:
        positions = count()
        while True:
            yield self._order.indices(islice(positions, _CHUNK))
