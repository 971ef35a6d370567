"""The iterator that training pulls microbatches from."""

from collections.abc import Iterator
from itertools import count

from loongplug.data.collate import collate
from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.media import MediaLoader
from loongplug.data.microbatch import Microbatch
from loongplug.data.order import SampleOrder, microbatch_positions
from loongplug.data.pack_stream import PackStream
from loongplug.data.packing import PackPlanner


class MicrobatchLoader(Iterator[Microbatch]):
    """Endless microbatches of one data-parallel rank, from any number of consumed samples on.

    Every rank of a data-parallel replica builds the text part itself, and all build the same;
    ranks that do not run the image encoder pass ``with_images=False`` and never decode an
    image or a video's frame. No collectives.

    ``seed=None`` keeps the file's order; ``restart_after`` (in samples, over all data-parallel
    ranks) starts the stream over, for evaluations that shall see the same samples each time.

    With ``look_ahead``, rows are packs (see :class:`~loongplug.data.packing.PackPlanner`), and
    whatever counts samples here counts packs: a microbatch is one of them.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int | None,
        with_images: bool,
        consumed_samples: int = 0,
        restart_after: int | None = None,
        look_ahead: int | None = None,
    ) -> None:
        assert look_ahead is None or micro_batch_size == 1, "a microbatch is one pack"
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._media = MediaLoader(dataset.processor, videos=dataset.videos) if with_images else None
        self._restart_after = restart_after
        self._order = SampleOrder(
            len(dataset), seed=seed, restart_after=restart_after if look_ahead is None else None
        )
        self._look_ahead = look_ahead
        self._packs: PackStream | None = None
        self.consumed_samples = consumed_samples  # over all data-parallel ranks

    def __next__(self) -> Microbatch:
        """The next microbatch; ValueError with file and line for a row that cannot be used."""
        positions = microbatch_positions(
            self.consumed_samples,
            micro_batch_size=self._micro_batch_size,
            dp_rank=self._dp_rank,
            dp_size=self._dp_size,
        )
        microbatch = collate(
            self._samples(positions),
            pad_token_id=self._dataset.processor.pad_token_id,
            seq_length=self._dataset.seq_length,
            media=self._media,
            packed=self._look_ahead is not None,
        )
        self.consumed_samples += self._micro_batch_size * self._dp_size
        return microbatch

    def _samples(self, rows: range) -> list[Sample]:
        """The samples of these rows of the stream; of packs, there is one."""
        if self._look_ahead is None:
            return [self._sample_at(position) for position in rows]
        (row,) = rows
        row = row % self._restart_after if self._restart_after else row
        return self._pack(row, look_ahead=self._look_ahead)

    def _pack(self, number: int, *, look_ahead: int) -> list[Sample]:
        """Pack ``number`` of the stream, which is planned from its beginning on."""
        if self._packs is None or number < self._packs.given:
            planner = PackPlanner(seq_length=self._dataset.seq_length, look_ahead=look_ahead)
            self._packs = PackStream(map(self._sample_at, count()), planner)
        while self._packs.given < number:
            next(self._packs)
        return next(self._packs)

    def _sample_at(self, position: int) -> Sample:
        (index,) = self._order.indices((position,))
        return self._dataset[index]
