"""The first rows of the validation data as questions, and the microbatches that ask them."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset
from loongplug.data.microbatch import Microbatch
from loongplug.data.processor import Processor
from loongplug.data.sample import RowExtent, Sample
from loongplug.data.sample_order import Evaluation, StepSizes
from loongplug.data.tokens import require_length
from loongplug.evaluate import MAX_NEW_TOKENS
from loongplug.evaluate.questions import Question, questions_of
from loongplug.parallel.states import decoder_layout
from loongplug.training.rank_data import RankData

_GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a replica is asked: its ``questions``, in ``microbatches`` of a step.

    ``chunk`` gives what a virtual chunk takes of them, so many ``pieces`` for each microbatch. A
    rank that encodes and does not decode is asked no questions, and takes the others' media.

    A microbatch has so many ``rows``, each ``length`` tokens long, with ``room`` for an answer
    behind each question. An answer ends with one of ``ends``, or has no more room.
    """

    chunk: Callable[[int], Iterator[Microbatch]]
    pieces: int
    questions: Sequence[Question]
    microbatches: int
    rows: int
    length: int
    room: int
    ends: Collection[int]


def questions_in(dataset: ChatDataset, *, limit: int) -> list[Question]:
    """The questions of the first ``limit`` rows, or of all there are.

    Raises:
        ValueError: a row cannot be asked or is too long, with its place.
    """
    found = questions_of(dataset.rows, dataset.processor, videos=dataset.videos, limit=limit)
    for question in found:
        require_length(len(question.input_ids), where=question.where, seq_length=dataset.seq_length)
    return found


def end_tokens(processor: Processor) -> frozenset[int]:
    """What ends an answer, as an export of the run says it: the folder's own, else the tokenizer's.

    Raises:
        ValueError: the folder's file cannot be read.
    """
    file = processor.folder / _GENERATION_FILE
    try:
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        given = None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if given is None:
        return frozenset((processor.end_token_id,))
    return frozenset(given if isinstance(given, list) else (given,))


class AskedRows(ChatDataset):
    """Rows as ``questions``, each with ``room`` tokens behind it for an answer."""

    def __init__(
        self, dataset: ChatDataset, questions: Sequence[Question], *, room: int, seq_length: int
    ) -> None:
        vars(self).update(vars(dataset))
        self.seq_length = seq_length
        self.extents = None  # those of the rows
        self._asked = {each.row: _asking(each, dataset, room=room) for each in questions}

    def __getitem__(self, index: int) -> Sample:
        """The question of the row; nothing in it counts for a loss."""
        return self._asked[index]


def asked_of(rank: RankData, dataset: ChatDataset, questions: Sequence[Question]) -> Asked:
    """What this rank's model replica is asked of all ``questions``; nothing where none decodes."""
    args, decodes, decoder = rank.args, rank.engine.decodes, decoder_layout()
    parts = decoder.sequence_shards(sequence_parallel=args.sequence_parallel)
    longest = max(len(each.input_ids) for each in questions)
    length = -(-(longest + MAX_NEW_TOKENS) // parts) * parts
    rows = args.eval_micro_batch_size
    multiple = 1
    virtual = "virtual_pipeline_model_parallel_size" if decodes else "virtual_stages_of_decoder"
    if getattr(args, virtual) is not None:
        # The interleaved schedule runs them in groups.
        multiple = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    plan = asking(questions, each=rows * decoder.dp, multiple=multiple)
    stream = rank.stream(
        AskedRows(dataset, questions, room=MAX_NEW_TOKENS, seq_length=length),
        name="questions",
        again=True,
        micro_batch_size=rows,
        sizes=StepSizes.constant(plan.batch),
        seed=None,
        evaluation=plan,
        bad_samples=BadSamples(args.bad_sample),
    )
    microbatches, taken = plan.batch // (rows * decoder.dp), rank.parts(training=False)
    own: tuple[int, ...] = ()
    if decodes:
        slots = plan.slots(micro_batch_size=rows, dp_ranks=taken, dp_size=decoder.dp)
        own = tuple(row for slot in islice(slots, microbatches) for row in slot.rows)
    return Asked(
        chunk=stream.chunk,
        pieces=len(taken),
        questions=[each for each in questions if each.row in own],
        microbatches=microbatches,
        rows=rows,
        length=length,
        room=MAX_NEW_TOKENS,
        ends=end_tokens(dataset.processor),
    )


def asking(questions: Sequence[Question], *, each: int, multiple: int) -> Evaluation:
    """One step that asks all, ``each`` of them at a time on all replicas together.

    All replicas have equally many microbatches, a multiple of ``multiple``; the last are blank.
    """
    microbatches = -(-len(questions) // (each * multiple)) * multiple
    rows = tuple((question.row,) for question in questions)
    return Evaluation(rows=len(rows), of_rows=len(rows), batch=microbatches * each, packs=rows)


def _asking(question: Question, dataset: ChatDataset, *, room: int) -> Sample:
    """A question with so many places behind it, none of which counts for a loss."""
    processor = dataset.processor
    answer = np.full(room, processor.pad_token_id, dtype=np.int64)
    ids = np.concatenate([question.input_ids, answer])
    media = list(zip(question.media, question.extents, strict=True))
    return Sample(
        input_ids=ids,
        labels=ids,
        loss_mask=np.zeros(len(ids), dtype=np.float32),
        position_ids=dataset.positions(ids, media),
        extent=RowExtent(lengths=(len(ids),), shown=(len(media),), media=question.extents),
        where=question.where,
    )
