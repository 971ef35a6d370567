"""Greedy answers of the weights that train to the first validation rows, and how many are right."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from loongplug.context.token_split import OwnPart
from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset
from loongplug.data.microbatch import Microbatch
from loongplug.data.processor import Processor
from loongplug.data.sample import RowExtent, Sample
from loongplug.data.sample_order import Evaluation, StepSizes
from loongplug.data.tokens import require_length
from loongplug.evaluate import MAX_NEW_TOKENS
from loongplug.evaluate.metrics import is_match
from loongplug.evaluate.questions import Question, questions_of
from loongplug.parallel.states import decoder_layout
from loongplug.training.forward_step import ForwardStep
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
    """The questions of the first ``limit`` rows; ValueError names one that cannot be asked."""
    found = questions_of(dataset.rows, dataset.processor, videos=dataset.videos, limit=limit)
    for question in found:
        require_length(len(question.input_ids), where=question.where, seq_length=dataset.seq_length)
    return found


def end_tokens(processor: Processor) -> frozenset[int]:
    """What ends an answer in an export of the run: as its folder says, else its tokenizer."""
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


# A microbatch's number and the token that follows each of its rows, [b] int64.
_Followed = tuple[int, Tensor]


class Answers:
    """Answers this replica's questions with the chunks that train.

    For each token the whole text so far goes through the run's own forward-only schedule, as a
    step of an evaluation does; nothing is kept from token to token. All replicas take equally many
    steps, as experts may lie on several of them.
    """

    def __init__(
        self,
        asked: Callable[[], Asked],
        forward_step: ForwardStep,
        *,
        processor: Processor,
        device: Callable[[], torch.device],
    ) -> None:
        """``asked`` is called at the first evaluation, when the parallel state is there."""
        self._ask = asked
        self._forward_step = forward_step
        self._processor = processor
        self._device = device
        self._asked: Asked | None = None
        self._chunks: Sequence[Any] = ()

    def built(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks

    def scored(self) -> tuple[int, int]:
        """How many answers of this replica are right, and how many there are. Every rank enters."""
        asked = self._asked = self._asked or self._ask()
        answers = self._answers(asked)
        decode = self._processor.tokenizer.decode  # a batch of none is an empty answer to it
        texts = [decode(each, skip_special_tokens=True) for each in answers]
        pairs = zip(texts, asked.questions, strict=True)
        right = sum(is_match(text, question.answer) for text, question in pairs)
        return right, len(answers)

    def _answers(self, asked: Asked) -> list[list[int]]:
        """The tokens of each answer, without the one that ends it."""
        # By chunk, without labels: the model then gives logits. Collective: the replica's ranks.
        count, rows = asked.microbatches * asked.pieces, asked.rows
        microbatches = [
            [replace(next(each), labels=None) for _ in range(count)]
            for each in map(asked.chunk, range(len(self._chunks)))
        ]
        lengths = [len(each.input_ids) for each in asked.questions]
        answers: list[list[int]] = [[] for _ in asked.questions]
        ended = [False] * len(answers)
        with _evaluating(self._chunks), torch.no_grad():
            for place in range(asked.room):
                last = [length + place - 1 for length in lengths]
                tokens = self._next_tokens(asked, microbatches, last=last)
                for row, token in enumerate(tokens[: len(answers)]):
                    ended[row] = ended[row] or token in asked.ends
                    if not ended[row]:
                        answers[row].append(token)
                    # The next forward finds it, on the rank that embeds its place.
                    microbatch = microbatches[0][row // rows]
                    ids, column = microbatch.input_ids, _column(microbatch.own, last[row] + 1)
                    if ids is not None and column is not None:
                        ids[row % rows, column] = token
                left = torch.tensor(ended.count(False), device=self._device())
                dist.all_reduce(left, op=dist.ReduceOp.MAX)  # of all replicas
                if not left.item():
                    break
        return answers

    def _next_tokens(
        self,
        asked: Asked,
        microbatches: Sequence[Sequence[Microbatch]],
        *,
        last: Sequence[int],
    ) -> list[int]:
        """The likeliest token behind place ``last`` of each row. Every rank enters."""
        from megatron.training import training  # asked each time: a run puts its own there

        rows = asked.rows

        def forward_step(
            data_iterator: Iterator[Microbatch], model: Any, return_schedule_plan: bool = False
        ) -> tuple[Any, Callable[..., _Followed]]:
            microbatch = next(data_iterator)
            output, _ = self._forward_step(iter((microbatch,)), model, return_schedule_plan)
            first = microbatch.number * rows
            return output, partial(
                _followed, microbatch.number, last[first : first + rows], own=microbatch.own
            )

        iterators = [iter(each) for each in microbatches]
        found: list[_Followed] = training.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self._chunks),
            num_microbatches=asked.microbatches,
            seq_length=asked.length,
            micro_batch_size=rows,
            decoder_seq_length=asked.length,
            forward_only=True,
            collect_non_loss_data=True,
        )
        tokens = torch.zeros(asked.microbatches, rows, dtype=torch.int64, device=self._device())
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            for number, of_rows in found:
                tokens[number] = of_rows
            # Each row's last token lies on one of the ranks that share it; the others have 0.
            dist.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
        dist.broadcast(
            tokens,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        chosen: list[int] = tokens.flatten().tolist()
        return chosen


def _column(own: OwnPart | None, place: int) -> int | None:
    """The column of a row's place in what this rank holds; None where another rank holds it."""
    return place if own is None else own.column(place)


def _followed(
    number: int,
    last: Sequence[int],
    logits: Tensor,
    *,
    own: OwnPart | None,
    non_loss_data: bool,
) -> _Followed:
    """The likeliest token behind places ``last`` of ``logits`` [b, s, vocabulary / tp].

    0 for a place that is not in this rank's ``own`` part of the row. Rows behind those of ``last``
    ask nothing. Collective: the tensor parallel group.
    """
    assert non_loss_data, "there are no labels to make a loss of"
    columns = [_column(own, place) for place in (*last, *[0] * (logits.shape[0] - len(last)))]
    here = logits[
        torch.arange(logits.shape[0], device=logits.device), [each or 0 for each in columns]
    ].float()
    held = torch.tensor([each is not None for each in columns], device=logits.device)
    return number, gather_from_tensor_model_parallel_region(here).argmax(dim=-1) * held


@contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    """Inside, there is no dropout, and Megatron does not time what is run."""
    config = get_model_config(chunks[0])
    timers, config.timers = config.timers, None
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        config.timers = timers
        for chunk in chunks:
            chunk.train()
