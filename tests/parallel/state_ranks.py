"""Parallel states inside a forked rank."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ranks import model_parallel, run_ranks

from loongplug.parallel.layout import Layout
from loongplug.parallel.states import (
    PARALLEL_STATES,
    adopt_parallel_state,
    create_parallel_state,
    destroy_parallel_states,
)

DECODER, ENCODER, AUDIO = "text_decoder", "image_encoder", "audio_encoder"


@contextmanager
def adopted(**sizes: int) -> Iterator[Layout]:
    """Megatron's parallel state of these sizes as the decoder's."""
    with model_parallel(**sizes):
        try:
            yield adopt_parallel_state()
        finally:
            destroy_parallel_states()


@contextmanager
def decoder_and_encoder(
    *, encoder_tp: int = 1, on_first_stage: bool = True, seed: int = 1, **sizes: int
) -> Iterator[Layout]:
    """The decoder's state of these sizes, and an encoder's beside it; the latter's layout."""
    with adopted(**sizes) as decoder:
        ranks = decoder.stage_size if on_first_stage else decoder.world_size
        encoder = Layout(tp=encoder_tp, dp=ranks // encoder_tp)  # ranks of later stages have none
        create_parallel_state(ENCODER, encoder, seed=seed)
        yield encoder


def in_one_rank(test: Callable[..., None]) -> Callable[..., None]:
    """The test in a forked rank that has three states."""

    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        run_ranks(_with_states, 1, test=functools.partial(test, **parameters))

    return run


def _with_states(rank: int, test: Callable[[], None]) -> None:
    with decoder_and_encoder():
        create_parallel_state(AUDIO, Layout(), seed=1)
        test()
        assert PARALLEL_STATES.current == DECODER
