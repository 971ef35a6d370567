"""The data iterators that Megatron's training loop pulls microbatches from."""

import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from loongplug.data.bad_samples import BadSamples
from loongplug.data.blend import parse_blend
from loongplug.data.dataset import ChatDataset
from loongplug.data.fingerprint import fingerprint
from loongplug.data.image_patches import PatchSizes
from loongplug.data.kept_files import said_by
from loongplug.data.length_index import sample_lengths
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch, TextNeeds
from loongplug.data.pixel_limits import PixelLimits
from loongplug.data.processor import (
    TOKEN_IDS,
    MediaTokens,
    Processor,
    load_processor,
    require_fit,
)
from loongplug.data.source import Assignment, EncoderUnits, LocalSource, StepSource
from loongplug.data.step_sizes import StepSizes
from loongplug.data.units import token_ids
from loongplug.data.workers import WorkerSettings
from loongplug.evaluate import MAX_NEW_TOKENS
from loongplug.hetero.engine import Engine
from loongplug.hetero.modes import balance_of, mode_of
from loongplug.models.architecture import EncoderArchitecture, MultimodalArchitecture
from loongplug.models.entries import encoders
from loongplug.models.layers.router import balances_by
from loongplug.models.registry import family_of
from loongplug.platform import current_platform
from loongplug.training.answers import Asked
from loongplug.training.delivery import (
    ReplicaDelivery,
    deliver,
    loaded_replicas,
    replica_group,
)
from loongplug.training.packing_place import note_packing_place, packing_place
from loongplug.training.question_source import QuestionSource, end_tokens, questions_in
from loongplug.training.rows import TRAINING, length_settings, rows_of, training_files
from loongplug.training.step_sizes import step_sizes

_LOADERS = 3  # of training, of validation, and what asks
_PATCH_SIZES = ("patch_size", "temporal_patch_size", "spatial_merge_size")

Iterators = tuple[Iterator[Microbatch], Iterator[Microbatch] | None, None]


class DatasetProvider:
    """Megatron's dataset provider, for ``--dataloader-type external``.

    Every rank reads the text of its data parallel replica's samples and builds what its stages
    consume of it; media are loaded by one rank of those that encode them.
    """

    is_distributed = True  # Megatron calls it on every rank, not only on tensor parallel rank 0

    def __init__(self, args: Namespace, model: MultimodalArchitecture, *, engine: Engine) -> None:
        """Open the files; raises ValueError for what is missing or does not fit the model."""
        self._args = args
        self._engine = engine
        self._model = model
        processor = self._processor_of(model)

        def open_dataset(
            files: Sequence[str] | None, *, flag: str, split: str
        ) -> ChatDataset | None:
            if not files:
                return None
            return ChatDataset(
                rows_of(args, files, flag=flag, split=split),
                processor=processor,
                seq_length=args.seq_length,
                training_phase=args.training_phase,
                video_style=model.video_style(),
                plain_positions=model.plain_positions,
                video_fps=args.video_fps,
            )

        train_files = training_files(args)
        evaluated = args.valid_data_path if args.eval_iters else None
        with said_by(args.rank == 0):
            train = open_dataset(train_files, flag=TRAINING, split="train")
            self._valid = open_dataset(evaluated, flag="--valid-data-path", split="val")
        assert train is not None, "the start-up rules ask for training data"
        self.train = train
        blend = parse_blend(train_files, flag=TRAINING)
        settings = {
            "seed": args.seed,
            "seq_length": args.seq_length,
            "training_phase": args.training_phase,
            "video_fps": args.video_fps,
            "packing_look_ahead": args.packing_look_ahead if args.packing else None,
            # Absent without it, as in the notes of runs before there was such a flag.
            **({"special_tokens_in_text": True} if args.special_tokens_in_text else {}),
            **PixelLimits.of(args).given(),
        }
        self.fingerprint = fingerprint(train.sources, processor, weights=blend.weights, **settings)
        self.questions = (
            []
            if self._valid is None or args.eval_generate is None
            else questions_in(self._valid, limit=args.eval_generate)
        )
        self.valid_fingerprint = (
            fingerprint(self._valid.sources, processor, **settings) if self._valid else {}
        )

        def indexed_lengths(dataset: ChatDataset | None) -> NDArray[np.int32] | None:
            if dataset is None or not args.packing:
                return None
            settings = length_settings(args, model)
            return sample_lengths(dataset.rows, settings, seq_length=args.seq_length)

        self._lengths, self._valid_lengths = map(indexed_lengths, (train, self._valid))
        self._loaders: list[MicrobatchLoader] = []
        # Of training and, where there is one, validation: the microbatches of a chunk.
        self._chunks: list[Callable[[int], Iterator[Microbatch]]] = []
        self.bad_samples = BadSamples(args.bad_sample)  # met in training

    @property
    def indexed(self) -> dict[str, str]:
        """Digests of the lengths that an index tells of training and of validation data."""
        found = {"training": self._lengths, "validation": self._valid_lengths}
        return {
            name: f"{zlib.crc32(lengths.tobytes()):08x}"
            for name, lengths in found.items()
            if lengths is not None
        }

    def __call__(self, sample_counts: Any, vp_stage: int | None = None) -> Iterators:
        """Iterators for one chunk of this rank, from the consumed samples on.

        Collective: the default group, when called for the first chunk.
        """
        chunk = vp_stage or 0
        if chunk == 0:
            self._start()
        train, *valid = (iterator(chunk) for iterator in self._chunks)
        return train, valid[0] if valid else None, None

    def asked(self) -> Asked:
        """What ``--eval-generate`` asks this rank's model replica."""
        assert self._valid is not None, "a rule asks for validation data"
        args, processor = self._args, self._valid.processor
        tp = args.tensor_model_parallel_size if args.sequence_parallel else 1
        longest = max(len(each.input_ids) for each in self.questions)
        length = -(-(longest + MAX_NEW_TOKENS) // tp) * tp
        virtual = args.virtual_pipeline_model_parallel_size is not None
        source = QuestionSource(
            self.questions,
            self._valid,
            room=MAX_NEW_TOKENS,
            micro_batch_size=args.eval_micro_batch_size,
            # The interleaved schedule runs them in groups.
            multiple=(
                args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
                if virtual
                else 1
            ),
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            encoders=self._encoder_units(),
            bad_samples=BadSamples(args.bad_sample),
        )
        return Asked(
            loader=self._loader(source, news=None, channel=2, seq_length=length, packed=False),
            questions=source.questions,
            microbatches=source.microbatches,
            length=length,
            room=MAX_NEW_TOKENS,
            ends=end_tokens(processor),
        )

    def close(self) -> None:
        """End the background processes."""
        for loader in self._loaders:
            loader.source.close()

    def _start(self) -> None:
        args, sizes = self._args, step_sizes(self._args)
        assert sizes is not None, "Megatron's checks set what was not given"
        decodes = self._engine.decodes
        news = replica_group() if self.bad_samples.skips else None
        valid_bad_samples = BadSamples(args.bad_sample)
        for bad_samples in (self.bad_samples, valid_bad_samples):
            bad_samples.speaks = decodes and speaks_for_replica()
        training: dict[str, Any] = {
            "micro_batch_size": args.micro_batch_size,
            "sizes": sizes,
            "seed": args.seed,
            "consumed_samples": args.consumed_train_samples,
            "lengths": self._lengths,
            "resume": packing_place(args),
            "bad_samples": self.bad_samples,
        }
        valid: dict[str, Any] = {
            "micro_batch_size": args.eval_micro_batch_size,
            "sizes": StepSizes.constant(args.eval_global_batch_size),
            "seed": None,
            "lengths": self._valid_lengths,
            "restart_after": args.eval_iters * args.eval_global_batch_size,
            "bad_samples": valid_bad_samples,
        }
        if not decodes:
            # Megatron's first rank tells all others, chunk by chunk, what there is to do. Here is
            # one chunk, however many the decoder's ranks have.
            for _ in range((args.virtual_stages_of_decoder or 1) - 1):
                todo = torch.empty(3, dtype=torch.long, device=current_platform().device)
                dist.broadcast(todo, 0)
            self._chunks = [self._pieces(self.train, **training)]
            if self._valid is not None:
                self._chunks.append(self._pieces(self._valid, **valid))
            return
        train = self._source(self.train, **training)
        note = partial(note_packing_place, train, args) if args.packing else None
        loaders = [self._loader(train, news=news, channel=0, on_made=note)]
        if self._valid is not None:
            loaders.append(self._loader(self._source(self._valid, **valid), news=news, channel=1))
        self._loaders += loaders
        self._chunks = [each.chunk for each in loaders]

    def _pieces(
        self, dataset: ChatDataset, **options: Any
    ) -> Callable[[int], Iterator[Microbatch]]:
        """What this rank's encoder makes, which lies on ranks of its own: piece by piece.

        Of each microbatch number, the part of each decoder replica's microbatch that is this
        encoder replica's, in the order of the replicas.
        """
        own = self._engine.own
        (entry,) = (each for each in encoders(self._model.entries()) if each.name == own)
        name, rank = entry.name, dist.get_rank()
        place = self._engine.encoders[name].place
        loaders = []
        for piece in place.made_by(rank):
            ranks = place.given_media(rank)
            samples = None if self._args.packing else piece.samples
            units = EncoderUnits(
                kinds=entry.media, loads=loaded_replicas([ranks], rank=rank), samples=samples
            )
            source = self._source(
                dataset, dp_rank=piece.edge.decoder, encoders={name: units}, **options
            )
            delivery = ReplicaDelivery(
                [ranks],
                place.replica_group,
                row_values=self._model.encoder(name).row_values,
                device=current_platform().device,
                news=None,
                channel=0,
            )
            loaders.append(
                self._made(
                    source,
                    deliveries={name: delivery},
                    needs=(TextNeeds(input_ids=False, labels=False, loss_mask=False),),
                    only=samples,
                )
            )
        self._loaders += loaders
        return lambda chunk: _in_turn(loaders)

    def _source(
        self,
        dataset: ChatDataset,
        *,
        dp_rank: int | None = None,
        encoders: dict[str, EncoderUnits] | None = None,
        **options: Any,
    ) -> LocalSource:
        """The steps of a decoder replica, this rank's unless another's ``dp_rank`` is given.

        ``options`` are training's or validation's.
        """
        args = self._args
        return LocalSource(
            dataset,
            dp_rank=parallel_state.get_data_parallel_rank() if dp_rank is None else dp_rank,
            dp_size=parallel_state.get_data_parallel_world_size(),
            encoders=self._encoder_units() if encoders is None else encoders,
            look_ahead=args.packing_look_ahead if args.packing else None,
            workers=WorkerSettings(
                processes=args.num_workers, pin_memory=current_platform().name == "cuda"
            ),
            **options,
        )

    def _encoder_units(self) -> dict[str, EncoderUnits]:
        """How this rank makes units, by encoder. Collective like the engine's places."""
        found = {}
        for entry in encoders(self._model.entries()):
            edge = self._engine.encoders[entry.name].place.edge
            if edge is None:  # media are loaded on the encoder's own ranks
                found[entry.name] = EncoderUnits(kinds=entry.media, loads=())
                continue
            found[entry.name] = EncoderUnits(
                kinds=entry.media,
                assignment=assignment_of(
                    self._args, self._model.encoder(entry.name), replicas=len(edge.replicas)
                ),
                loads=loaded_replicas(edge.replicas, rank=dist.get_rank()),
            )
        return found

    def _loader(
        self,
        source: StepSource,
        *,
        news: dist.ProcessGroup | None,
        channel: int,
        seq_length: int | None = None,
        packed: bool | None = None,
        on_made: Callable[[], None] | None = None,
    ) -> MicrobatchLoader:
        """``seq_length`` and ``packed``: the run's, unless others are given."""
        deliveries = {}
        for number, (name, engine) in enumerate(self._engine.encoders.items()):
            place = engine.place
            if place.edge is None:
                continue
            deliveries[name] = ReplicaDelivery(
                place.edge.replicas,
                place.replica_group,
                row_values=self._model.encoder(name).row_values,
                device=current_platform().device,
                news=news,
                channel=_LOADERS * number + channel,
            )
        return self._made(
            source,
            deliveries=deliveries,
            needs=text_needs(self._args),
            seq_length=seq_length,
            packed=packed,
            on_made=on_made,
        )

    def _made(
        self,
        source: StepSource,
        *,
        deliveries: Mapping[str, ReplicaDelivery],
        needs: Sequence[TextNeeds],
        seq_length: int | None = None,
        packed: bool | None = None,
        on_made: Callable[[], None] | None = None,
        only: range | None = None,
    ) -> MicrobatchLoader:
        processor = self.train.processor
        return MicrobatchLoader(
            source,
            processor=processor,
            seq_length=seq_length or self._args.seq_length,
            token_ids={
                entry.name: token_ids(processor, entry.media)
                for entry in encoders(self._model.entries())
            },
            packed=self._args.packing if packed is None else packed,
            deliver=partial(deliver, deliveries),
            needs=needs,
            pins=current_platform().name == "cuda",
            on_made=on_made,
            only=only,
        )

    def _processor_of(self, model: MultimodalArchitecture) -> Processor:
        """That of ``--tokenizer-model``; ValueError where it does not fit the model."""
        args = self._args
        family = family_of(model, trusted_packages=args.trusted_packages)
        texts = {**family.marks, **family.special_tokens}
        takes = {
            kind: model.encoder(each.name)
            for each in encoders(model.entries())
            for kind in each.media
        }
        sees: Any = takes.get("image")
        hears: Any = takes.get("audio")
        processor = load_processor(
            args.tokenizer_model,
            tokens=MediaTokens(
                image=texts.get("image_token_id"),
                video=texts.get("video_token_id"),
                start=texts.get("vision_start_token_id"),
                end=texts.get("vision_end_token_id"),
                audio=texts.get("audio_token_id"),
                audio_start=texts.get("audio_start_token_id"),
                audio_end=texts.get("audio_end_token_id"),
            ),
            patch_sizes=None
            if sees is None
            else PatchSizes(
                patch_size=sees.patch_size,
                spatial_merge_size=sees.spatial_merge_size,
                image_size=getattr(sees, "image_size", None),  # of encoders that fix it
            ),
            audio_sizes=None if hears is None else hears.sizes,
            special_tokens_in_text=args.special_tokens_in_text,
            pixel_limits=PixelLimits.of(args),
        )
        patches = () if sees is None else _PATCH_SIZES
        require_fit(
            processor,
            **{name: getattr(model, name, None) for name in TOKEN_IDS},
            vocab_size=model.foundation.vocab_size,
            **{name: getattr(sees, name) for name in patches},
        )
        return processor


def _in_turn(loaders: Sequence[Iterator[Microbatch]]) -> Iterator[Microbatch]:
    """One of each, over and over; nothing where there is none."""
    while loaders:
        for each in loaders:
            yield next(each)


def assignment_of(args: Namespace, encoder: EncoderArchitecture, *, replicas: int) -> Assignment:
    """Which of an encoder's replicas encodes what, as the flags say."""
    balance = balance_of(args, encoder) if mode_of(args, encoder).any_owner else None
    return Assignment(replicas=replicas, by_cost=None if balance is None else balance.assign)


def speaks_for_replica() -> bool:
    """One rank per data parallel replica: its first stage's first tensor parallel rank."""
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


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
