"""The iterator that training pulls microbatches from."""

from collections.abc import Iterator

from loongplug.data.collate import collate
from loongplug.data.dataset import ChatDataset
from loongplug.data.media import MediaLoader
from loongplug.data.microbatch import Microbatch
from loongplug.data.order import SampleOrder, microbatch_positions


class MicrobatchLoader(Iterator[Microbatch]):
    """Endless microbatches of one data-parallel rank, from any number of consumed samples on.

    Every rank of a data-parallel replica builds the text part itself, and all build the same;
    ranks that do not run the image encoder pass ``with_images=False`` and never decode an
    image or a video's frame. No collectives.

    ``seed=None`` keeps the file's order; ``restart_after`` (in samples, over all data-parallel
    ranks) starts the stream over, for evaluations that shall see the same samples each time.
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
    ) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._media = MediaLoader(dataset.processor, videos=dataset.videos) if with_images else None
        self._order = SampleOrder(len(dataset), seed=seed, restart_after=restart_after)
        self.consumed_samples = consumed_samples  # over all data-parallel ranks

    def __next__(self) -> Microbatch:
        """The next microbatch; ValueError with file and line for a row that cannot be used."""
        positions = microbatch_positions(
            self.consumed_samples,
            micro_batch_size=self._micro_batch_size,
            dp_rank=self._dp_rank,
            dp_size=self._dp_size,
        )
        samples = [self._dataset[index] for index in self._order.indices(positions)]
        microbatch = collate(
            samples,
            pad_token_id=self._dataset.processor.pad_token_id,
            seq_length=self._dataset.seq_length,
            media=self._media,
        )
        self.consumed_samples += self._micro_batch_size * self._dp_size
        return microbatch
