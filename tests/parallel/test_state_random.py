"""Random numbers of parallel states: seeded by a module's own coordinates, kept apart."""

from typing import Any

import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from ranks import run_ranks
from state_ranks import DECODER, ENCODER, adopted, decoder_and_encoder

from loongplug.parallel.layout import Layout
from loongplug.parallel.states import (
    PARALLEL_STATES,
    create_parallel_state,
    parallel_state_of,
)


def _draws(rank: int, **sizes: int) -> dict[str, Any] | None:
    with decoder_and_encoder(**sizes) as encoder:
        if rank not in encoder.ranks:
            return None
        with parallel_state_of(ENCODER):
            default = torch.rand(4)
            with get_cuda_rng_tracker().fork():
                sharded = torch.rand(4)
            with get_cuda_rng_tracker().fork("expert-parallel-rng"):
                experts = torch.rand(4)
        return {
            "tp": encoder.coordinates(rank).tp,
            "default": default.tolist(),
            "sharded": sharded.tolist(),
            "experts": experts.tolist(),
        }


def test_random_numbers_are_a_function_of_the_encoders_own_coordinates() -> None:
    layouts = (
        {"tp": 4, "encoder_tp": 2},
        {"tp": 2, "pp": 2, "encoder_tp": 2, "on_first_stage": False},
        {"tp": 2, "pp": 2, "encoder_tp": 2},
    )
    draws = [each for sizes in layouts for each in run_ranks(_draws, 4, **sizes) if each]
    assert len(draws) == 4 + 4 + 2
    for draw in draws:
        assert draw["default"] == draws[0]["default"]
        (first, *_) = (each for each in draws if each["tp"] == draw["tp"])
        assert draw == first
    assert draws[0]["sharded"] != draws[1]["sharded"]


def _of_stages(rank: int) -> list[list[float]]:
    """As one stage of a module, and as a replica of one without stages."""
    drawn = []
    with adopted():
        for name, layout in ((ENCODER, Layout(pp=2)), ("audio_encoder", Layout(dp=2))):
            create_parallel_state(name, layout, seed=1)
            with parallel_state_of(name):
                drawn.append(torch.rand(4).tolist())
    return drawn


def test_stages_of_a_module_draw_numbers_of_their_own() -> None:
    """Layers in the same place of two stages would begin with the same weights."""
    (first, alike), (second, also_alike) = run_ranks(_of_stages, 2)
    assert first != second
    assert alike == also_alike


def _streams(rank: int) -> None:
    """Each state goes on with its own numbers, whatever is drawn in others."""

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            sharded = torch.rand(2)
        return [*torch.rand(2).tolist(), *sharded.tolist()]

    with decoder_and_encoder(tp=2):
        create_parallel_state("audio_encoder", Layout(dp=2), seed=1)
        expected = {}
        for name in (DECODER, ENCODER, "audio_encoder"):
            PARALLEL_STATES.switch(name)
            generators = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
            expected[name] = draw() + draw()
            torch.set_rng_state(generators[0])
            get_cuda_rng_tracker().set_states(generators[1])
        assert len({tuple(numbers) for numbers in expected.values()}) == 3
        found: dict[str, list[float]] = {name: [] for name in expected}
        for name in (DECODER, ENCODER, "audio_encoder", ENCODER, "audio_encoder", DECODER):
            PARALLEL_STATES.switch(name)
            found[name] += draw()
        PARALLEL_STATES.switch(DECODER)
        assert found == expected


def test_random_numbers_go_on_where_a_state_left_them() -> None:
    run_ranks(_streams, 2)


def _trackers(rank: int) -> None:
    with adopted():
        tensor_parallel_random.model_parallel_cuda_manual_seed(
            5, inference_rng_tracker=True, force_reset_rng=True
        )
        kind = type(get_cuda_rng_tracker()).__name__
        create_parallel_state(ENCODER, Layout(), seed=1)
        with parallel_state_of(ENCODER):
            assert type(get_cuda_rng_tracker()).__name__ == kind
            assert get_cuda_rng_tracker().is_inference_rng_tracker
        tensor_parallel_random.initialize_rng_tracker(force_reset=True)


def test_a_tracker_is_of_the_decoders_kind() -> None:
    run_ranks(_trackers, 1)
