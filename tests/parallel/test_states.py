"""Parallel states: what a switch gives Megatron, what it keeps, and what it refuses."""

from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from ranks import model_parallel, run_ranks
from state_ranks import DECODER, ENCODER, adopted, decoder_and_encoder

from loongplug.parallel.layout import Layout, encoder_layout
from loongplug.parallel.megatron_globals import STATE_NAMES
from loongplug.parallel.states import (
    PARALLEL_STATES,
    adopt_parallel_state,
    create_parallel_state,
    destroy_parallel_states,
    layout_of,
    live_layout,
    parallel_state_of,
    process_groups,
)

# Fields of a ProcessGroupCollection, and the kinds of a layout.
KINDS = {
    "tp": "tp",
    "pp": "pp",
    "mp": "tp_pp",
    "cp": "cp",
    "tp_cp": "tp_cp",
    "dp": "dp",
    "dp_cp": "dp_cp",
    "dp_cp_gtp_remat": "dp_cp",
    "intra_dp_cp": "dp_cp",
    "tp_dp_cp": "tp_dp_cp",
    "ep": "ep",
    "expt_tp": "etp",
    "tp_ep": "etp_ep",
    "tp_ep_pp": "etp_ep_pp",
    "expt_dp": "edp",
    "expt_dp_gtp_remat": "edp",
    "intra_expt_dp": "edp",
    "intra_dist_opt": "tp_cp_dp_pp",
}


def _ranks_of(groups: ProcessGroupCollection) -> dict[str, list[int]]:
    return {
        kind: dist.get_process_group_ranks(getattr(groups, field)) for field, kind in KINDS.items()
    }


def _globals() -> dict[str, Any]:
    return {name: vars(parallel_state)[name] for name in STATE_NAMES}


def _in_two_layouts(rank: int, sizes: dict[str, int], encoder: Layout) -> None:
    with adopted(**sizes) as decoder:
        before = _globals()
        create_parallel_state(ENCODER, encoder, seed=3)
        assert _globals() == before
        assert PARALLEL_STATES.current == DECODER
        for name, layout in ((DECODER, decoder), (ENCODER, encoder), (DECODER, decoder)):
            assert layout_of(name) == layout
            if rank not in layout.ranks:
                continue
            assert _ranks_of(process_groups(name)) == {
                kind: layout.group(kind, rank) for kind in KINDS.values()
            }
            with parallel_state_of(name):
                assert live_layout() == replace(layout, first_rank=0, order=())
                total = torch.tensor([rank])
                dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
                assert total.item() == sum(layout.group("tp", rank))
                source = parallel_state.get_tensor_model_parallel_src_rank()
                assert source == layout.group("tp", rank)[0]
        assert _globals() == before


@pytest.mark.parametrize(
    ("world_size", "sizes", "encoder"),
    [
        (4, {"tp": 4}, Layout(tp=2, dp=2)),
        (4, {"tp": 2, "pp": 2}, Layout(dp=2)),
        (4, {"tp": 2, "pp": 2}, Layout(tp=1, dp=4)),
        (8, {"tp": 2, "pp": 2, "cp": 2}, Layout(tp=2, dp=2)),
        (8, {"tp": 2, "ep": 4, "etp": 1}, Layout(dp=8)),
        # tensor parallel over several stages, which are not neighbours
        (4, {"pp": 2}, encoder_layout(Layout(pp=2, dp=2), tp=2, on_first_stage=False)),
        (8, {"pp": 4}, encoder_layout(Layout(pp=4, dp=2), tp=2, on_first_stage=False)),
        # neither all ranks nor from the first on; experts of its own
        (5, {}, Layout(tp=2, dp=2, ep=2, etp=2, first_rank=1)),
        (5, {}, Layout(cp=2, pp=2, first_rank=1)),
    ],
)
def test_each_state_has_the_groups_of_its_layout(
    world_size: int, sizes: dict[str, int], encoder: Layout
) -> None:
    run_ranks(_in_two_layouts, world_size, sizes=sizes, encoder=encoder)


def _every_field(rank: int) -> None:
    with decoder_and_encoder(tp=2):
        groups = process_groups(ENCODER)
        # What is not set answers None as well, but makes Megatron make a group of its own.
        assert {each.name for each in fields(groups)} == set(vars(groups))
        empty = {name for name, group in vars(groups).items() if group is None}
        assert empty == {"hcp", "inter_dist_opt", "dp_cp_ag", "expt_dp_ag"}


def test_every_field_of_a_collection_is_set() -> None:
    run_ranks(_every_field, 2)


def _gloo(rank: int) -> list[bool]:
    made = []
    for gloo in (True, False):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=gloo)
        adopt_parallel_state()
        create_parallel_state(ENCODER, Layout(tp=2), seed=1)
        with parallel_state_of(ENCODER):
            made.append(parallel_state._DATA_PARALLEL_GROUP_GLOO is not None)
        destroy_parallel_states()
        parallel_state.destroy_model_parallel()
    return made


def test_gloo_groups_are_made_where_the_decoder_has_them() -> None:
    assert run_ranks(_gloo, 2) == [[True, False]] * 2


def _timeouts(rank: int) -> list[float]:
    with adopted():
        create_parallel_state(ENCODER, Layout(tp=2), seed=1, timeout_minutes=0.5)

        def timeout() -> float:
            group = process_groups(ENCODER).tp
            return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

        before = timeout()
        parallel_state.update_pg_timeout(timedelta(seconds=7))
        return [before, timeout()]


def test_timeouts_are_set_and_later_changed_for_all_groups() -> None:
    assert run_ranks(_timeouts, 2) == [[30.0, 7.0]] * 2


# What is kept


def _kept(rank: int) -> None:
    with decoder_and_encoder(tp=2):
        assert parallel_state.get_global_memory_buffer() is not None
        buffers, metrics = [], []
        for name in (DECODER, ENCODER):
            with parallel_state_of(name):
                buffers.append(parallel_state.get_global_memory_buffer())
                metrics.append(get_moe_metrics_tracker())
        assert buffers[0] is not buffers[1]
        assert metrics[0] is not metrics[1]
        with parallel_state_of(ENCODER):
            parallel_state.set_virtual_pipeline_model_parallel_rank(3)
            parallel_state._HYBRID_DP_CP_GROUPS[2] = "in place"
            parallel_state.set_tensor_model_parallel_rank(7)
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None
        assert parallel_state._HYBRID_DP_CP_GROUPS == {}
        assert parallel_state.get_tensor_model_parallel_rank() == rank
        parallel_state.set_virtual_pipeline_model_parallel_rank(1)
        with parallel_state_of(ENCODER):
            assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 3
            assert parallel_state._HYBRID_DP_CP_GROUPS == {2: "in place"}
            assert parallel_state.get_tensor_model_parallel_rank() == 7
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
        # and the same for whatever else there is
        with parallel_state_of(ENCODER):
            vars(parallel_state).update(dict.fromkeys(STATE_NAMES, "encoder's"))
        assert "encoder's" not in _globals().values()
        with parallel_state_of(ENCODER):
            assert set(_globals().values()) == {"encoder's"}


def test_changes_within_a_state_stay_with_it() -> None:
    run_ranks(_kept, 2)


def _nested(rank: int) -> None:
    with decoder_and_encoder(tp=2):
        create_parallel_state("audio_encoder", Layout(dp=2), seed=1)
        with parallel_state_of(ENCODER), parallel_state_of("audio_encoder"):
            assert parallel_state.get_data_parallel_world_size() == 2
            with parallel_state_of("audio_encoder"), parallel_state_of(ENCODER):
                assert PARALLEL_STATES.current == ENCODER
            assert PARALLEL_STATES.current == "audio_encoder"
        assert PARALLEL_STATES.current == DECODER
        # A block that itself changes the state ends as any other.
        with parallel_state_of(ENCODER):
            PARALLEL_STATES.switch("audio_encoder")
        assert PARALLEL_STATES.current == DECODER


def test_switches_nest() -> None:
    run_ranks(_nested, 2)


def _after_exceptions(rank: int) -> None:
    with decoder_and_encoder(tp=2):
        before = _globals()
        for error in (ValueError, KeyboardInterrupt, SystemExit):
            with pytest.raises(error):
                _fail_in_encoder(error)
            assert PARALLEL_STATES.current == DECODER
            assert _globals() == before
        random = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="not divisible"):
            # fails within Megatron, on all ranks alike
            create_parallel_state("audio_encoder", _Lying(tp=2), seed=1)
        assert _globals() == before
        assert torch.equal(torch.get_rng_state(), random)
        assert get_cuda_rng_tracker().is_initialized()
        with pytest.raises(ValueError, match="known are"):
            layout_of("audio_encoder")
        create_parallel_state("audio_encoder", Layout(tp=2), seed=1)


def _fail_in_encoder(error: type[BaseException]) -> None:
    with parallel_state_of(ENCODER):
        torch.rand(1)
        raise error


class _Lying(Layout):
    @property
    def world_size(self) -> int:
        return 1


def test_exceptions_leave_the_state_as_it_was() -> None:
    run_ranks(_after_exceptions, 2)


def _destroyed(rank: int) -> None:
    with decoder_and_encoder(tp=2):
        parallel_state.set_virtual_pipeline_model_parallel_rank(5)
        PARALLEL_STATES.switch(ENCODER)
        destroy_parallel_states()
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 5
        destroy_parallel_states()
        assert PARALLEL_STATES.current is None
        assert adopt_parallel_state() == Layout(tp=2)


def test_destroying_goes_back_to_the_decoder() -> None:
    run_ranks(_destroyed, 2)


# Misuse


def _error(call: Callable[[], Any]) -> str:
    before = _globals()
    with pytest.raises((ValueError, RuntimeError)) as error:
        call()
    assert _globals() == before
    return f"{type(error.value).__name__}: {error.value}"


def _misuse(rank: int) -> list[str]:
    errors = []
    with model_parallel(tp=2, pp=2):
        errors += [
            _error(lambda: PARALLEL_STATES.switch(ENCODER)),
            _error(lambda: create_parallel_state(ENCODER, Layout(), seed=1)),
        ]
        encoder = Layout(dp=adopt_parallel_state().stage_size)
        create_parallel_state(ENCODER, encoder, seed=1)
        errors += [
            _error(lambda: process_groups("image_encodr")),
            _error(lambda: create_parallel_state(ENCODER, encoder, seed=1)),
            _error(adopt_parallel_state),
        ]
        if rank == 3:
            errors.append(_error(parallel_state_of(ENCODER).__enter__))
        assert PARALLEL_STATES.current == DECODER
        destroy_parallel_states()
    return errors


def test_misuse_says_what_is_wrong() -> None:
    for found, expected in zip(
        run_ranks(_misuse, 4)[3],
        (
            "RuntimeError: there are no parallel states yet, so none of",
            "RuntimeError: 'image_encoder' has to be created beside an adopted",
            "ValueError: there is no parallel state 'image_encodr': known are 'text_decoder', ",
            "ValueError: there is a parallel state 'image_encoder' already",
            "ValueError: 'text_decoder' has been adopted already",
            "RuntimeError: rank 3 has no part in 'image_encoder', which has ranks 0 to 1.",
        ),
        strict=True,
    ):
        assert found.startswith(expected)
