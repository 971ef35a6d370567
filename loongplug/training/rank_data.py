"""What the data of a rank are made of, whether it decodes or encodes alone."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from loongplug.context.row_parts import RowParts
from loongplug.data.assignment import EncoderUnits
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import Delivery, MicrobatchLoader
from loongplug.data.media import coded_media
from loongplug.data.microbatch import Microbatch, TextNeeds
from loongplug.data.processor import Processor
from loongplug.data.source import LocalSource
from loongplug.data.video import VideoProcessor
from loongplug.data.workers import WorkerSettings
from loongplug.hetero.engine import Engine
from loongplug.models.architecture import MultimodalArchitecture
from loongplug.models.entries import encoders
from loongplug.parallel.states import decoder_layout
from loongplug.platform import current_platform
from loongplug.training.delivery import News, ReplicaDelivery
from loongplug.training.step_rows import row_lengths_of

# All ranks have been through the step before the last: the optimizer's norm is of all of them.
_RECENT_STEPS = 3

# Makes the steps of a decoder replica: of its ``dp_rank``, with units made as ``encoders`` say.
SourceOf = Callable[..., LocalSource]


class Microbatches(Protocol):
    """An endless stream of microbatches, or of pieces of them."""

    def chunk(self, index: int) -> Iterator[Microbatch]:
        """As this virtual chunk of the rank consumes them."""

    def close(self) -> None:
        """End what works in the background."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What a stream is of, and how it differs from the run's others.

    ``source_of`` makes the steps of which a rank takes its part. Streams of one run differ in their
    ``name``. ``again``: a microbatch's media are taken again and again, and nobody trains on it.
    ``seq_length`` and ``packed``: the run's, unless others are given. ``on_made`` is called with
    each microbatch of a stream of whole ones.
    """

    source_of: SourceOf
    name: str
    training: bool = False
    again: bool = False
    seq_length: int | None = None
    packed: bool | None = None
    on_made: Callable[[LocalSource], None] | None = None


@dataclass(frozen=True, kw_only=True)
class RankData(ABC):
    """How this rank's streams of microbatches are made.

    ``news`` is where bad samples are told; None where none may be left out.
    """

    args: Namespace
    model: MultimodalArchitecture
    engine: Engine
    processor: Processor
    videos: VideoProcessor
    news: Store | None

    @abstractmethod
    def pieces(self, *, training: bool) -> int:
        """How many a stream gives for one microbatch, in training or in evaluation."""

    @abstractmethod
    def stream(self, settings: StreamSettings) -> Microbatches:
        """What this rank takes of the steps that a source makes, of training or evaluation."""

    def _loader(
        self,
        source: LocalSource,
        settings: StreamSettings,
        *,
        deliveries: Mapping[str, Delivery],
        needs: Sequence[TextNeeds],
        on_made: Callable[[], None] | None = None,
        only: range | None = None,
        parts: RowParts | None = None,
    ) -> MicrobatchLoader:
        return MicrobatchLoader(
            source,
            processor=self.processor,
            seq_length=settings.seq_length or self.args.seq_length,
            token_ids={
                entry.name: self.processor.places(*entry.media)
                for entry in encoders(self.model.entries())
            },
            packed=self.args.packing if settings.packed is None else settings.packed,
            row_lengths=None if settings.seq_length else row_lengths_of(self.args),
            deliveries=deliveries,
            needs=needs,
            pins=current_platform().name == "cuda",
            on_made=on_made,
            only=only,
            parts=parts,
        )

    def _delivery(
        self,
        encoder: str,
        replicas: Sequence[Sequence[int]],
        settings: StreamSettings,
        *,
        replica: int,
    ) -> ReplicaDelivery:
        """Of an encoder, whose replicas have these ranks, for a decoder replica."""
        return ReplicaDelivery(
            replicas,
            self.engine.encoders[encoder].place.replica_group,
            rank=dist.get_rank(),
            row_values=self.model.encoder(encoder).row_values,
            coded=coded_media(self.processor, self.videos),
            device=current_platform().device,
            news=self._news(encoder, settings, replica=replica),
            keeps=settings.again,
        )

    def _news(self, encoder: str, settings: StreamSettings, *, replica: int) -> News | None:
        """Of an encoder's media for a decoder replica; None where nobody is to be told."""
        if self.news is None or settings.again:
            return None
        args, dp = self.args, decoder_layout().dp
        # Microbatches of a step or an evaluation, as many as there can be.
        training = args.global_batch_size // (args.micro_batch_size * dp)
        evaluation = args.eval_global_batch_size // (args.eval_micro_batch_size * dp)
        return News(
            store=PrefixStore(settings.name, self.news),
            encoder=encoder,
            replica=replica,
            recent=_RECENT_STEPS * max(training, evaluation * max(args.eval_iters, 1)),
            seconds=60.0 * args.distributed_timeout_minutes,
        )


def local_source(
    args: Namespace,
    dataset: ChatDataset,
    *,
    dp_rank: int,
    encoders: Mapping[str, EncoderUnits],
    same: Callable[..., None],
    **options: Any,
) -> LocalSource:
    """The steps of a decoder replica; ``same`` and ``options`` are training's or validation's."""
    options = {
        "look_ahead": args.packing_look_ahead if args.packing else None,
        "workers": WorkerSettings(
            processes=args.num_workers, pin_memory=current_platform().name == "cuda"
        ),
        **options,
    }
    return LocalSource(
        dataset,
        dp_rank=dp_rank,
        dp_size=decoder_layout().dp,
        encoders=encoders,
        same=partial(same, dp_rank),
        **options,
    )
