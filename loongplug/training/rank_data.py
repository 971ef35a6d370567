"""The data of a rank: the text that its stages consume, the media that it encodes, its place."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import PrefixStore, Store

from loongplug.context.row_parts import RowParts
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import Delivery, MicrobatchLoader, RowLengths
from loongplug.data.media_loader import CodedMedia, coded_media
from loongplug.data.microbatch import TextNeeds
from loongplug.data.planned_media import ONE_REPLICA, Assignment, EncoderUnits
from loongplug.data.sample_order import ResumePoint
from loongplug.data.source import LocalSource
from loongplug.data.workers import WorkerSettings
from loongplug.hetero.engine import Engine
from loongplug.hetero.modes import balance_of, mode_of
from loongplug.hetero.placement import ApartPiece
from loongplug.models.architecture import EncoderArchitecture, MultimodalArchitecture
from loongplug.models.entries import Entry, encoders
from loongplug.models.layers.router import balances_by
from loongplug.parallel.states import decoder_layout
from loongplug.platform import current_platform
from loongplug.training.delivery import News, ReplicaDelivery, SameRows, loaded_elsewhere

# All ranks have been through the step before the last: the optimizer's norm is of all of them.
_RECENT_STEPS = 3

# What says where in a stream of packs a checkpoint was: how many were consumed does not, as some
# samples were held back. It travels in Megatron's arguments, a part of every checkpoint.
PACKING_PLACE = "loongplug_packing_place"

_NO_TEXT = TextNeeds(input_ids=False, labels=False, loss_mask=False)


@dataclass(frozen=True, kw_only=True)
class RankData:
    """How this rank's streams of microbatches are made.

    One that decodes takes its replica's, whole. One that encodes alone takes no text: of each
    microbatch number, of each decoder replica's in turn, the part that is its encoder replica's.

    ``news`` is where bad samples are told; None where none may be left out.
    """

    args: Namespace
    model: MultimodalArchitecture
    engine: Engine
    same: SameRows
    news: Store | None

    def parts(self, *, training: bool) -> dict[int, range | None]:
        """By decoder replica, which samples of a microbatch a stream is of; None for all."""
        own = self.engine.own
        if own is None:
            return {parallel_state.get_data_parallel_rank(): None}
        made = self.engine.encoders[own].place.made_by(dist.get_rank(), training=training)
        return {each.decoder: self._samples(each) for each in made}

    def stream(
        self,
        dataset: ChatDataset,
        *,
        name: str,
        training: bool = False,
        again: bool = False,
        **options: Any,
    ) -> MicrobatchLoader:
        """An endless stream, which has a ``name``; ``options`` are the source's.

        ``again``: rows of the dataset's length whose media are taken again and again, and nobody
        trains on them.
        """
        args, own = self.args, self.engine.own
        parts = self.parts(training=training)
        pins = current_platform().name == "cuda"
        workers = WorkerSettings(processes=0 if again else args.num_workers, pin_memory=pins)
        packed = args.packing and not again
        coded = coded_media(dataset.processor, dataset.videos)
        made = {
            entry.name: self._of_encoder(entry, name, training=training, again=again, coded=coded)
            for entry in encoders(self.model.entries())
            if own in (None, entry.name)
        }
        source = LocalSource(
            dataset,
            parts=parts,
            dp_size=decoder_layout().dp,
            encoders={name: units for name, (units, _) in made.items()},
            look_ahead=args.packing_look_ahead if packed else None,
            same=partial(self.same, name),
            text=own is None,
            workers=workers,
            **options,
        )
        notes = training and packed and own is None
        cp, row_parts = decoder_layout().cp, None  # of all of a row
        if cp > 1:  # a rank that encodes alone holds none, and tells lengths by the first
            rank = parallel_state.get_context_parallel_rank() if own is None else 0
            row_parts = RowParts(cp=cp, rank=rank, balance=args.cp_balance)
        return MicrobatchLoader(
            source,
            processor=dataset.processor,
            seq_length=dataset.seq_length,
            token_ids={
                entry.name: dataset.processor.places(*entry.media)
                for entry in encoders(self.model.entries())
            },
            packed=packed,
            row_lengths=None if again else row_lengths_of(args),
            deliveries={name: each for name, (_, each) in made.items() if each is not None},
            needs=_text_needs(args) if own is None else (_NO_TEXT,),
            pins=pins,
            on_made=partial(note_packing_place, source, args) if notes else None,
            parts=row_parts,
        )

    def _of_encoder(
        self, entry: Entry, stream: str, *, training: bool, again: bool, coded: CodedMedia | None
    ) -> tuple[EncoderUnits, Delivery | None]:
        """How this rank makes an encoder's units. Collective like the engine's places."""
        engine, encoder = self.engine.encoders[entry.name], self.model.encoder(entry.name)
        place, rank = engine.place, dist.get_rank()
        news = None if again else self._news(entry.name, stream)
        assignment, replicas = ONE_REPLICA, tuple[Sequence[int], ...]()
        if place.edge is not None:
            replicas = place.edge.replicas
            assignment = assignment_of(self.args, encoder, replicas=len(replicas))
            if training and engine.step_planner is not None:
                assignment = replace(assignment, by_plan=engine.step_planner)
        elif engine.here:
            replicas = (place.given_media(rank),)  # the first stage alone needs media
        loads = tuple(number for number, ranks in enumerate(replicas) if ranks[0] == rank)
        units = EncoderUnits(kinds=entry.media, assignment=assignment, loads=loads)
        if replicas:
            return units, ReplicaDelivery(
                replicas,
                place.replica_group,
                rank=rank,
                row_values=encoder.row_values,
                coded=coded,
                device=current_platform().device,
                news=news,
                keeps=again,
                recorder=engine.recorder,
            )
        assert place.pieces is not None, "the encoder has ranks of its own"
        replica = parallel_state.get_data_parallel_rank()
        pieces = [
            (place.given_media(each.ranks[0])[0], self._samples(each))
            for each in place.pieces[training]
            if each.decoder == replica
        ]
        return units, None if news is None else partial(loaded_elsewhere, news, pieces)

    def _samples(self, piece: ApartPiece) -> range | None:
        """A piece's samples of its microbatch; None for all of a pack, which is whole."""
        return None if self.args.packing else piece.samples

    def _news(self, encoder: str, stream: str) -> News | None:
        """Where word of an encoder's bad media lies; None where nobody is to be told."""
        if self.news is None:
            return None
        args, dp = self.args, decoder_layout().dp
        # Microbatches of a step or an evaluation, as many as there can be.
        training = args.global_batch_size // (args.micro_batch_size * dp)
        evaluation = args.eval_global_batch_size // (args.eval_micro_batch_size * dp)
        return News(
            store=PrefixStore(stream, self.news),
            encoder=encoder,
            recent=_RECENT_STEPS * max(training, evaluation * max(args.eval_iters, 1)),
            seconds=60.0 * args.distributed_timeout_minutes,
            recorder=self.engine.encoders[encoder].recorder,
        )


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


def _text_needs(args: Namespace) -> list[TextNeeds]:
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


def row_lengths_of(args: Namespace) -> RowLengths | None:
    """How long the run's rows are; None where all have ``--seq-length`` tokens.

    That is so of packs, which are nearly full, and of rows whose experts gather the tokens of
    several replicas: those gather equally many of each.
    """
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    gathers = args.num_experts and args.moe_token_dispatcher_type == "allgather"
    of_experts = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    if args.packing or (gathers and tp * cp % of_experts):
        return None
    shards = tp if args.sequence_parallel else 1
    parts = shards if cp == 1 else lcm(2, shards) * cp
    return RowLengths(parts=parts, by_step=args.pipeline_model_parallel_size > 1)


def note_packing_place(source: LocalSource, args: Namespace) -> None:
    """Tell ``args`` where a resumed run would go on; they know it from every microbatch on."""
    place = source.resume_point()
    assert place is not None, "only packs have such a place"
    setattr(args, PACKING_PLACE, place.plain())


def packing_place(args: Namespace) -> ResumePoint | None:
    """Where the checkpoint that was loaded goes on; None without one, or when it has no packs."""
    data = getattr(args, PACKING_PLACE, None)
    if data is None or data["packs"] != args.consumed_train_samples:
        return None
    return ResumePoint.of_plain(data)
