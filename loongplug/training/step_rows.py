"""Rows no longer than needed: which rule a run has, and what pipeline stages are told of it."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import lcm
from typing import Any

from loongplug.data.loader import RowLengths
from loongplug.data.microbatch import Microbatch
from loongplug.observe.recorder import NOTHING, Recorder

Schedule = Callable[..., Any]  # a forward-backward function of Megatron's


def row_lengths_of(args: Namespace) -> RowLengths | None:
    """How long the run's rows are; None where all have ``--seq-length`` tokens.

    That is so of packs, which are nearly full, and of rows whose experts gather the tokens of
    several replicas: those gather equally many of each.
    """
    if args.packing or _replicas_gather_tokens(args):
        return None
    cp = args.context_parallel_size
    tp = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return RowLengths(
        parts=tp if cp == 1 else lcm(2, tp) * cp,
        by_step=args.pipeline_model_parallel_size > 1,
    )


def _replicas_gather_tokens(args: Namespace) -> bool:
    if not args.num_experts or args.moe_token_dispatcher_type != "allgather":
        return False
    row: int = args.tensor_model_parallel_size * args.context_parallel_size
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return row % (etp * args.expert_model_parallel_size) != 0


class StepRows:
    """Tells the pipeline's schedule how long the rows of each of its steps are.

    All microbatches of such a step have one length (:class:`RowLengths`), and every stage finds it
    in the first: stages that expect it need not send each other shapes.
    """

    def __init__(self) -> None:
        self.recorder: Recorder = NOTHING

    def schedules(self, get_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
        """Wrap Megatron's ``get_forward_backward_func``."""

        def get_forward_backward_func(*args: object, **kwargs: object) -> Schedule:
            schedule = get_schedule(*args, **kwargs)

            def forward_backward(*, data_iterator: Any, **options: Any) -> Any:
                several = isinstance(data_iterator, list)
                first, *others = data_iterator if several else [data_iterator]
                with self.recorder.span("data", "the step's first microbatch"):
                    microbatch: Microbatch = next(first)
                # Megatron's iterators have a next, and nothing else.
                again: Iterator[Microbatch] = chain((microbatch,), iter(partial(next, first), None))
                length = microbatch.split.length
                return schedule(
                    data_iterator=[again, *others] if several else again,
                    **options | {"seq_length": length, "decoder_seq_length": length},
                )

            return forward_backward

        return get_forward_backward_func
