"""The data iterators that Megatron's training loop pulls microbatches from."""

import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from loongplug.data.bad_samples import BadSamples, Remarks
from loongplug.data.blend import Source, parse_blend
from loongplug.data.cache_folder import LOG, said_by
from loongplug.data.chat_template import habits_of
from loongplug.data.check import index_beside
from loongplug.data.data_options import PixelLimits
from loongplug.data.dataset import ChatDataset
from loongplug.data.extent_index import IndexedExtents, path_of
from loongplug.data.fingerprint import fingerprint
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.media_kinds import TOKEN_IDS
from loongplug.data.media_sizes import PatchSizes
from loongplug.data.microbatch import Microbatch
from loongplug.data.processor import Processor, require_fit
from loongplug.data.processor_folder import load_processor
from loongplug.data.sample_order import Evaluation, Packing, StepSizes
from loongplug.hetero.engine import Engine
from loongplug.models.architecture import MultimodalArchitecture
from loongplug.models.entries import encoders
from loongplug.models.registry import family_of
from loongplug.platform import current_platform
from loongplug.training.answers import Asked, asked_of, questions_in
from loongplug.training.delivery import SameRows, store_of_news
from loongplug.training.rank_data import RankData, packing_place, speaks_for_replica
from loongplug.training.rows import (
    TRAINING,
    survey_settings,
    training_files,
    training_rows,
    validation_rows,
)
from loongplug.training.start_agreement import start_store
from loongplug.training.step_sizes import step_sizes

# Flags that decide on the stream of samples.
_NOTED = ("seed", "seq_length", "training_phase", "video_fps", "special_tokens_in_text")
_PATCH_SIZES = ("patch_size", "temporal_patch_size", "spatial_merge_size")

Iterators = tuple[Iterator[Microbatch], Iterator[Microbatch] | None, None]


def _evaluation(dataset: ChatDataset, args: Namespace) -> Evaluation:
    """The evaluation that the flags ask for; without an index, rows are read for their lengths."""
    packing = None
    if args.packing:
        packing = Packing(seq_length=args.seq_length, look_ahead=args.packing_look_ahead)
    if dataset.extents is None:
        lengths = (len(dataset.text_parts([row])[0]) for row in range(len(dataset)))
    else:
        lengths = iter(dataset.extents.lengths(seq_length=args.seq_length).tolist())
    return Evaluation.plan(
        len(dataset),
        batch=args.eval_global_batch_size,
        most_steps=args.eval_iters,
        packing=packing,
        lengths=lengths,
    )


class DatasetProvider:
    """Megatron's dataset provider, for ``--dataloader-type external``.

    Every rank builds what it consumes of its rows' text: one that only encodes reads none of rows
    with an index. Media are loaded by one rank of those that encode them.
    """

    is_distributed = True  # Megatron calls it on every rank, not only on tensor parallel rank 0

    def __init__(self, args: Namespace, model: MultimodalArchitecture, *, engine: Engine) -> None:
        """Open the files; raises ValueError for what is missing or does not fit the model."""
        self._args = args
        self._engine = engine
        self._model = model
        processor = self._processor_of(model)

        dataset = partial(
            ChatDataset,
            processor=processor,
            seq_length=args.seq_length,
            training_phase=args.training_phase,
            video_style=model.video_style(),
            plain_positions=model.plain_positions,
            video_fps=args.video_fps,
        )
        with said_by(args.rank == 0):
            self.train = train = dataset(training_rows(args))
            evaluated = validation_rows(args)
        self._valid = None if evaluated is None else dataset(evaluated)
        blend = parse_blend(training_files(args), flag=TRAINING)
        settings = {
            **{name: getattr(args, name) for name in (*_NOTED, "valid_share")},
            "packing_look_ahead": args.packing_look_ahead if args.packing else None,
            "multi_turn": args.multi_turn if args.packing else None,
            "train_template_thought": args.training_phase == "sft" and args.train_template_thought,
            "ignore_keys": train.rows.access.ignored,
            "columns": train.rows.access.names,
            # Absent where it is dropped: by that, a run that goes on knows what was.
            **({} if args.transparency == "drop" else {"transparency": args.transparency}),
            **vars(PixelLimits.of(vars(args))),
        }
        self.fingerprint = fingerprint(train.sources, processor, weights=blend.weights, **settings)
        self.questions, self.valid_fingerprint = [], {}
        if self._valid is not None:
            self.valid_fingerprint = fingerprint(self._valid.sources, processor, **settings)
            if args.eval_generate is not None:
                self.questions = questions_in(self._valid, limit=args.eval_generate)
        self._settings = survey_settings(args, model)
        self._same_rows = SameRows(args, store=start_store(args, purpose="rows"))
        for data in filter(None, (train, self._valid)):
            # Without packing, nothing needs an index: a run goes on without one of other rows.
            try:
                data.extents = IndexedExtents.of(data.rows, self._settings)
            except ValueError as error:
                if args.packing:
                    raise
                if args.rank == 0:
                    LOG.warning("no index is used: %s", error)
            if not self._same_rows.all_have(data.extents is not None):
                data.extents = None  # on a node without one, rows are read for their extents
        self.evaluation: Evaluation | None = None
        if self._valid is not None:
            self.evaluation = _evaluation(self._valid, args)
            args.eval_iters = self.evaluation.steps
        self._end_index: Callable[[], None] = lambda: None
        self._streams: list[MicrobatchLoader] = []  # of training and, if any, of validation
        met = Remarks(literal_markers=args.literal_markers, indexed=train.extents is not None)
        self.bad_samples = BadSamples(args.bad_sample, met)  # met in training

    @property
    def planned(self) -> dict[str, str]:
        """Digests of what ranks plan by and alike: of each file's index, of an evaluation."""
        found = {"evaluation": f"{zlib.crc32(repr(self.evaluation).encode()):08x}"}
        for purpose, data in (("training", self.train), ("validation", self._valid)):
            if data is not None and data.extents is not None:
                indexes = zip(data.sources, data.extents.tables, strict=True)
                for number, (source, table) in enumerate(indexes, start=1):
                    name = f"index of {purpose} file {number}, {path_of(source).name}"
                    found[name] = f"{table.digest:08x}"
        return found

    @property
    def _unindexed(self) -> list[Source]:
        data = [each for each in (self.train, self._valid) if each is not None]
        sources = [each for one in data if one.extents is None for each in one.sources]
        return list({(path_of(x), getattr(x, "split", None)): x for x in sources}.values())

    @property
    def samples(self) -> int | None:
        """What an epoch takes: rows, or about so many packs; None where packs are not planned."""
        args, extents = self._args, self.train.extents
        if not args.packing:
            return len(self.train)
        if extents is None:
            return None
        tokens = int(extents.lengths(seq_length=args.seq_length).sum(dtype=np.int64))
        return -(-tokens // args.seq_length)

    @property
    def media(self) -> int | None:
        """How many media the training data have; None without an index."""
        extents = self.train.extents
        return None if extents is None else sum(len(each.kinds) for each in extents.tables)

    def told(self) -> Iterator[str]:
        """What a person should know of the data at a run's start, a line each."""
        args, train, extents = self._args, self.train, self.train.extents
        tables = () if extents is None else extents.tables
        rows = sum(len(each.tokens) for each in tables)
        unusable = sum(each.unusable(args.seq_length) for each in tables)
        if unusable and self.bad_samples.skips:
            share = f"{unusable} of {rows} rows of the training data ({unusable / rows:.1%})"
            yield f"{share} are left out, by their index of lengths."
        if files := ", ".join(str(path_of(each)) for each in self._unindexed):
            yield f"An index of the extents of rows is made beside this run: {files}."
        remarks = Remarks(literal_markers=args.literal_markers)
        for source, table in zip(train.sources, tables, strict=extents is not None):
            for remark, (count, row) in table.remarks.found.items():
                remarks.add([remark], where=source.where(int(row)), rows=count)
        for line in remarks.totals():
            yield f"Training data have {line}."
        if habits_of(train.processor.tokenizer).renders_again and args.training_phase == "sft":
            turns = f"Earlier turns are rendered differently: --multi-turn {args.multi_turn}"
            if extents is not None:
                usable = extents.lengths(seq_length=args.seq_length) > 0
                turns += f", {extents.by_row('answers')[usable].sum()} answers are trained on"
            yield f"{turns}."
        if (share := args.valid_share) is not None and self._valid is not None:
            kept = f"{len(self._valid)} of {sum(map(len, train.sources))} rows"
            yield f"{kept} of the training data are for validation alone: --valid-share {share:g}."

    def __call__(self, sample_counts: Any, vp_stage: int | None = None) -> Iterators:
        """Iterators for one chunk, from the consumed samples on; the first call is collective."""
        chunk = vp_stage or 0
        if chunk == 0:
            self._start()
        train, *valid = (stream.chunk(chunk) for stream in self._streams)
        return train, valid[0] if valid else None, None

    def asked(self) -> Asked:
        """What ``--eval-generate`` asks this rank's model replica."""
        assert self._valid is not None, "a rule asks for validation data"
        return asked_of(self._data, self._valid, self.questions)

    def close(self) -> None:
        self._end_index()
        for stream in self._streams:
            stream.close()

    def _start(self) -> None:
        args, sizes = self._args, step_sizes(self._args)
        if args.rank == 0 and self._unindexed:
            beside = index_beside(self._unindexed, self.train.surveyor, self._settings)
            self._end_index = beside.close
        assert sizes is not None, "Megatron's checks set what was not given"
        decodes, data = self._engine.decodes, self._data
        valid_bad_samples = BadSamples(args.bad_sample)
        for bad_samples in (self.bad_samples, valid_bad_samples):
            bad_samples.speaks = decodes and speaks_for_replica()
        if not decodes:
            # Megatron's first rank tells all others, chunk by chunk, what there is to do. Here is
            # one chunk, however many the decoder's ranks have.
            for _ in range((args.virtual_stages_of_decoder or 1) - 1):
                todo = torch.empty(3, dtype=torch.long, device=current_platform().device)
                dist.broadcast(todo, 0)
        train = data.stream(
            self.train,
            name="training",
            training=True,
            micro_batch_size=args.micro_batch_size,
            sizes=sizes,
            seed=args.seed,
            consumed_samples=args.consumed_train_samples,
            resume=packing_place(args),
            bad_samples=self.bad_samples,
        )
        self._streams.append(train)
        if self._valid is not None and self.evaluation is not None:
            valid = data.stream(
                self._valid,
                name="validation",
                micro_batch_size=args.eval_micro_batch_size,
                sizes=StepSizes.constant(self.evaluation.batch),
                seed=None,
                evaluation=self.evaluation,
                bad_samples=valid_bad_samples,
            )
            self._streams.append(valid)

    @cached_property
    def _data(self) -> RankData:
        return RankData(
            args=self._args,
            model=self._model,
            engine=self._engine,
            same=self._same_rows,
            news=store_of_news() if self.bad_samples.skips else None,
        )

    def _processor_of(self, model: MultimodalArchitecture) -> Processor:
        """The processor of ``--tokenizer-model``; ValueError where it does not fit the model."""
        args = self._args
        family = family_of(model, trusted_packages=args.trusted_packages)
        texts = {**family.marks, **family.special_tokens}
        takes: dict[str, Any] = {
            kind: model.encoder(each.name)
            for each in encoders(model.entries())
            for kind in each.media
        }
        sees, hears = takes.get("image"), takes.get("audio")
        processor = load_processor(
            args.tokenizer_model,
            tokens={name: text for name, text in texts.items() if name in TOKEN_IDS},
            patch_sizes=None
            if sees is None
            else PatchSizes(
                patch_size=sees.patch_size,
                spatial_merge_size=sees.spatial_merge_size,
                image_size=getattr(sees, "image_size", None),  # of encoders that fix it
            ),
            audio_sizes=None if hears is None else hears.sizes,
            special_tokens_in_text=args.special_tokens_in_text,
            multi_turn=args.multi_turn,
            train_template_thought=args.train_template_thought,
            pixel_limits=PixelLimits.of(vars(args)),
            transparency=args.transparency,
        )
        require_fit(
            processor,
            **{name: getattr(model, name, None) for name in processor.tokens},
            vocab_size=model.foundation.vocab_size,
            **{name: getattr(sees, name, None) for name in _PATCH_SIZES},
        )
        return processor
