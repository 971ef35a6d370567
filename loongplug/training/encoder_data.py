"""The data of a rank that encodes and does not decode: pieces of the decoder's microbatches."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import cycle

import torch.distributed as dist

from loongplug.context.row_parts import RowParts
from loongplug.data.assignment import EncoderUnits
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch, TextNeeds
from loongplug.hetero.placement import ApartPiece
from loongplug.models.entries import Entry, encoders
from loongplug.parallel.states import decoder_layout
from loongplug.training.delivery import loaded_replicas
from loongplug.training.rank_data import Microbatches, RankData, StreamSettings

_NO_TEXT = TextNeeds(input_ids=False, labels=False, loss_mask=False)


class EncoderData(RankData):
    """What this rank's encoder makes, piece by piece.

    Of each microbatch number, it is the part of each decoder replica's microbatch that is this
    encoder replica's, in the order of the replicas.
    """

    @cached_property
    def _entry(self) -> Entry:
        (found,) = (each for each in encoders(self.model.entries()) if each.name == self.engine.own)
        return found

    def pieces(self, *, training: bool) -> int:
        """See :meth:`RankData.pieces`."""
        return len(self._pieces(training=training))

    def stream(self, settings: StreamSettings) -> Microbatches:
        """See :meth:`RankData.stream`."""
        name = self._entry.name
        place = self.engine.encoders[name].place
        loading = [place.given_media(dist.get_rank())]  # the first stage alone needs media

        def loader(piece: ApartPiece) -> MicrobatchLoader:
            samples = samples_of(piece, packed=self.args.packing)
            units = EncoderUnits(
                kinds=self._entry.media,
                loads=loaded_replicas(loading, rank=dist.get_rank()),
                samples=samples,
            )
            delivery = self._delivery(name, loading, settings, replica=piece.decoder)
            return self._loader(
                settings.source_of(dp_rank=piece.decoder, encoders={name: units}, text=False),
                settings,
                deliveries={name: delivery},
                needs=(_NO_TEXT,),
                only=samples,
                parts=any_part(self.args),
            )

        return _InTurn([loader(each) for each in self._pieces(training=settings.training)])

    def _pieces(self, *, training: bool) -> tuple[ApartPiece, ...]:
        place = self.engine.encoders[self._entry.name].place
        return place.made_by(dist.get_rank(), training=training)


def any_part(args: Namespace) -> RowParts | None:
    """How the decoder's ranks share each row, of which this rank has none."""
    cp = decoder_layout().cp
    return None if cp == 1 else RowParts(cp=cp, rank=0, balance=args.cp_balance)


def samples_of(piece: ApartPiece, *, packed: bool) -> range | None:
    """Those of a microbatch that are the piece's; None for all of a pack, which is not split."""
    return None if packed else piece.samples


class _InTurn:
    """One of each loader's, over and over; nothing where there is none."""

    def __init__(self, loaders: Sequence[MicrobatchLoader]) -> None:
        self._loaders = loaders

    def chunk(self, index: int) -> Iterator[Microbatch]:
        """See :meth:`Microbatches.chunk`."""
        assert index == 0, "an encoder is one chunk"
        return (next(each) for each in cycle(self._loaders))

    def close(self) -> None:
        """See :meth:`Microbatches.close`."""
        for each in self._loaders:
            each.close()
