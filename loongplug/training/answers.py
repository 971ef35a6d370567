"""Greedy answers of the weights that train, in the layout of the run, and how many are right."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from loongplug.context.token_split import OwnPart
from loongplug.data.microbatch import Microbatch
from loongplug.data.processor import Processor
from loongplug.evaluate.metrics import is_match
from loongplug.training.forward_step import ForwardStep
from loongplug.training.questions import Asked

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
        """Take this rank's wrapped chunks."""
        self._chunks = chunks

    def scored(self) -> tuple[int, int]:
        """How many answers of this replica are right, and how many there are. Every rank enters.

        Draws no random numbers, and leaves the chunks in training mode as an evaluation does.
        """
        asked = self._asked = self._asked or self._ask()
        answers = self._answers(asked)
        decode = self._processor.tokenizer.decode  # a batch of none is an empty answer to it
        texts = [decode(each, skip_special_tokens=True) for each in answers]
        pairs = zip(texts, asked.questions, strict=True)
        right = sum(is_match(text, question.answer) for text, question in pairs)
        return right, len(answers)

    def _answers(self, asked: Asked) -> list[list[int]]:
        """The tokens of each answer, without the one that ends it."""
        microbatches, rows = _microbatches(asked, chunks=len(self._chunks)), asked.rows
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
                    _write(microbatches, row, last[row] + 1, token, rows=rows)
                if self._all(ended):
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
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                tokens,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        chosen: list[int] = tokens.flatten().tolist()
        return chosen

    def _all(self, ended: Sequence[bool]) -> bool:
        """Whether every answer of every replica has ended."""
        left = torch.tensor(len(ended) - sum(ended), device=self._device())
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
        return left.item() == 0


def _microbatches(asked: Asked, *, chunks: int) -> list[list[Microbatch]]:
    """By chunk, without labels: the model then gives logits. Collective: the replica's ranks."""
    count = asked.microbatches * asked.pieces
    return [
        [replace(next(each), labels=None) for _ in range(count)]
        for each in map(asked.chunk, range(chunks))
    ]


def _write(
    microbatches: Sequence[Sequence[Microbatch]], row: int, place: int, token: int, *, rows: int
) -> None:
    """Put a token where the next forward finds it, on the rank that embeds its place."""
    microbatch = microbatches[0][row // rows]
    ids, column = microbatch.input_ids, _column(microbatch.own, place)
    if ids is not None and column is not None:
        ids[row % rows, column] = token


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
    value, token = here.max(dim=-1)
    held = torch.tensor([each is not None for each in columns], device=logits.device)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return number, token * held
    mine = torch.stack([value.double(), (token + group.rank() * here.shape[-1]).double()])
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    values, tokens = torch.stack(every).unbind(dim=1)  # [tp, b] each
    best = values.argmax(dim=0, keepdim=True)
    return number, tokens.gather(0, best).squeeze(0).long() * held


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
