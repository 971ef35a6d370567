"""The data of a rank that decodes, and of encoders that lie with the decoder."""

from argparse import Namespace
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state

from loongplug.context.row_parts import RowParts
from loongplug.data.assignment import Assignment, EncoderUnits
from loongplug.data.loader import Delivery, MicrobatchLoader
from loongplug.data.microbatch import TextNeeds
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.modes import balance_of, mode_of
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.entries import encoders
from loongplug.models.layers.router import balances_by
from loongplug.training.delivery import loaded_elsewhere, loaded_replicas
from loongplug.training.encoder_data import samples_of
from loongplug.training.rank_data import RankData, StreamSettings


class DecoderData(RankData):
    """Whole microbatches: the text that this rank's stages consume, and the media it encodes."""

    def pieces(self, *, training: bool) -> int:
        """See :meth:`RankData.pieces`."""
        return 1

    def stream(self, settings: StreamSettings) -> MicrobatchLoader:
        """See :meth:`RankData.stream`."""
        source = settings.source_of(
            dp_rank=parallel_state.get_data_parallel_rank(),
            encoders=self._encoder_units(training=settings.training),
        )
        return self._loader(
            source,
            settings,
            deliveries=self._deliveries(settings),
            needs=text_needs(self.args),
            on_made=None if settings.on_made is None else partial(settings.on_made, source),
            parts=row_parts(self.args),
        )

    def _encoder_units(self, *, training: bool) -> dict[str, EncoderUnits]:
        """How this rank makes units, by encoder. Collective like the engine's places."""
        found = {}
        for entry in encoders(self.model.entries()):
            engine = self.engine.encoders[entry.name]
            edge = engine.place.edge
            if edge is None:  # media are loaded on the encoder's own ranks
                found[entry.name] = EncoderUnits(kinds=entry.media, loads=())
                continue
            assignment = assignment_of(
                self.args, self.model.encoder(entry.name), replicas=len(edge.replicas)
            )
            if training and engine.step_planner is not None:
                assignment = replace(assignment, by_plan=engine.step_planner)
            found[entry.name] = EncoderUnits(
                kinds=entry.media,
                assignment=assignment,
                loads=loaded_replicas(edge.replicas, rank=dist.get_rank()),
            )
        return found

    def _deliveries(self, settings: StreamSettings) -> dict[str, Delivery]:
        found: dict[str, Delivery] = {}
        replica = parallel_state.get_data_parallel_rank()
        for name, engine in self.engine.encoders.items():
            place = engine.place
            if place.edge is not None:
                found[name] = self._delivery(name, place.edge.replicas, settings, replica=replica)
            elif (news := self._news(name, settings, replica=replica)) is not None:
                found[name] = partial(loaded_elsewhere, news, self._pieces(place, settings))
        return found

    def _pieces(
        self, place: EncoderPlace, settings: StreamSettings
    ) -> list[tuple[int, range | None]]:
        """Of the pieces of all decoder replicas, who loads which samples of this rank's."""
        assert place.pieces is not None, "the encoder has ranks of its own"
        replica = parallel_state.get_data_parallel_rank()
        return [
            (place.given_media(each.ranks[0])[0], samples_of(each, packed=self.args.packing))
            for each in place.pieces[settings.training]
            if each.decoder == replica
        ]


def assignment_of(args: Namespace, encoder: EncoderArchitecture, *, replicas: int) -> Assignment:
    """Which of an encoder's replicas encodes what in steps that do not stream, as the flags say."""
    return Assignment(
        replicas=replicas,
        by_cost=balance_of(args, encoder).assign,
        whole_steps=args.use_vit_dp_balance and mode_of(args, encoder).on_every_stage,
    )


def speaks_for_replica() -> bool:
    """One rank per data parallel replica: its first stage's first rank."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=True) and first_of_stage()


def first_of_stage() -> bool:
    """Whether this is the first of the ranks that share a stage and its rows."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def row_parts(args: Namespace) -> RowParts | None:
    """Which part of each row this rank holds; None where it holds whole ones."""
    cp = parallel_state.get_context_parallel_world_size()
    if cp == 1:
        return None
    rank = parallel_state.get_context_parallel_rank()
    return RowParts(cp=cp, rank=rank, balance=args.cp_balance)


def text_needs(args: Namespace) -> list[TextNeeds]:
    """What each of this rank's virtual chunks consumes of a microbatch's text, by chunk."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return [
        TextNeeds.of_stage(
            first=first and chunk == 0,
            last=last and chunk == chunks - 1,
            balances=balances_by(
                experts=args.num_experts,
                auxiliary=args.moe_aux_loss_coeff,
                z_loss=args.moe_z_loss_coeff,
            ),
        )
        for chunk in range(chunks)
    ]
