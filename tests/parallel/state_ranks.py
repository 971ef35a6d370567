"""Parallel states inside a forked rank."""

from collections.abc import Iterator
from contextlib import contextmanager

from ranks import model_parallel

from loongplug.parallel.layout import Layout, encoder_layout
from loongplug.parallel.states import (
    adopt_parallel_state,
    create_parallel_state,
    destroy_parallel_states,
)

ENCODER, DECODER = "image_encoder", "text_decoder"


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
        encoder = encoder_layout(decoder, tp=encoder_tp, on_first_stage=on_first_stage)
        create_parallel_state(ENCODER, encoder, seed=seed)
        yield encoder
