"""Which cells the parity matrix has."""

from collections import Counter
from dataclasses import replace

import pytest

from loongplug.training.flags import read_command_line
from parity.cells import (
    ENCODER_DP,
    FULL,
    HEARING_MODELS,
    MODELS,
    MODES,
    MORE_MODELS,
    MOST_RANKS,
    SIZES,
    UNIFORM,
    Cell,
    choices,
    hearing_cells,
    layout_cells,
    layouts,
    pairs,
    sample,
)
from parity.published import TABLE_A8

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def cells():
    return [*layout_cells(), *hearing_cells()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_is_run_in_every_mode(cells, model, mode):
    ran = {
        (cell.encoder_tp, cell.tp, cell.pp, cell.vpp, cell.dp, cell.ep)
        for cell in cells
        if (cell.model, cell.mode) == (model, mode)
    }
    wanted = {
        (encoder_tp, tp, pp, vpp, dp, ep)
        for tp in SIZES
        for pp in SIZES
        for dp in SIZES
        if tp * pp * dp <= MOST_RANKS
        for vpp in (SIZES if pp > 1 else (1,))
        for encoder_tp in SIZES
        if encoder_tp < tp or (encoder_tp == tp and mode != ENCODER_DP)
        for ep in (SIZES if "moe" in model else (1,))
        if ep <= tp * dp
    }
    if mode == FULL:  # an encoder that makes up several whole stages
        wanted |= {
            (encoder_tp, tp, pp, 1, dp, 1)
            for tp, pp, encoder_tp in ((1, 2, 2), (1, 4, 2), (1, 4, 4), (2, 2, 4), (2, 4, 4))
            for dp in SIZES
            if tp * pp * dp <= MOST_RANKS
        }
    assert ran == wanted


@pytest.mark.parametrize("model", MODELS)
def test_every_two_values_of_two_axes_meet_where_they_can(cells, model):
    possible = {
        pair for layout in layouts(model) for cell in choices(layout) for pair in pairs(cell)
    }
    met = {pair for cell in cells if cell.model == model for pair in pairs(cell)}
    assert met == possible


@pytest.mark.parametrize("model", [*MORE_MODELS, *HEARING_MODELS])
def test_few_cells_have_every_value_in_every_mode(cells, model):
    mine = [cell for cell in cells if cell.model == model]
    assert len(mine) <= 20
    of_mode = {
        (cell.mode, name, value)
        for layout in layouts(model)
        for cell in choices(layout)
        for name, value in vars(cell).items()
    }
    assert {(cell.mode, *each) for cell in mine for each in vars(cell).items()} == of_mode
    assert any(cell.encoder_tp < cell.tp for cell in mine if cell.mode == UNIFORM)
    assert any(cell.encoder_tp > cell.tp for cell in mine if cell.mode == FULL)


def test_flags_say_what_the_cell_is():
    cell = Cell(
        model="qwen3_vl_moe_tiny",
        encoder_tp=1,
        tp=2,
        pp=2,
        vpp=2,
        dp=2,
        ep=4,
        sequence_parallel=True,
        recompute="both",
        optimizer="overlapped",
    )
    line = read_command_line(cell.flags())
    args = line.args
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (args.num_virtual_stages_per_pipeline_rank, args.expert_model_parallel_size) == (2, 4)
    assert args.sequence_parallel
    assert args.recompute_granularity == "full"
    assert args.use_distributed_optimizer
    assert args.overlap_grad_reduce
    assert args.overlap_param_gather
    assert line.overrides == (
        "model.image_encoder.recompute=true",
        "model.image_encoder.tensor_model_parallel_size=1",
    )
    assert not args.enable_encoder_hetero_dp
    assert not args.enable_full_hetero_dp
    assert Cell(model="qwen3_vl_tiny").flags() == [
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
    ]


@pytest.mark.not_quick
def test_flags_of_the_modes():
    """With an encoder TP in any case: without one it would be 1."""
    for encoder_tp in (1, 2, 4):
        sizes = {"encoder_tp": encoder_tp, "tp": 4, "pp": 2}
        line = read_command_line(
            Cell(model="qwen3_vl_tiny", mode=FULL, balance=True, **sizes).flags()
        )
        assert line.args.enable_full_hetero_dp
        assert line.args.use_vit_dp_balance
        assert line.args.dp_balance_trigger_threshold_vit == 0
        assert line.overrides == (f"model.image_encoder.tensor_model_parallel_size={encoder_tp}",)
        line = read_command_line(Cell(model="qwen3_vl_tiny", mode=ENCODER_DP, **sizes).flags())
        assert line.args.enable_encoder_hetero_dp
        assert not line.args.use_vit_dp_balance


def test_balance_is_for_replicas_with_several_units(cells):
    balanced = {(cell.mode, cell.microbatches > cell.encoder_replicas > 1) for cell in cells}
    assert balanced >= {(FULL, True), (FULL, False)}
    on = [cell for cell in cells if cell.balance]
    assert {cell.mode for cell in on} == {FULL}
    assert {(cell.microbatches, cell.encoder_replicas) for cell in on} == {(8, 2), (8, 4), (4, 2)}


@pytest.mark.parametrize("model", MODELS)
def test_the_layouts_of_table_a8_are_cells(cells, model):
    """As the paper runs them: on eight ranks, each module's TP and PP kept and its DP doubled."""
    for layout in TABLE_A8:
        assert layout.tp * layout.pp * layout.dp == layout.encoder_tp * layout.encoder_dp == 8
        assert any(layout.is_run_by(cell) for cell in cells if cell.model == model)


def test_which_cell_runs_a_published_layout():
    layout = TABLE_A8[-1]
    cell = Cell(model="qwen3_vl_tiny", mode=FULL, encoder_tp=2, tp=4, dp=2)
    assert layout.is_run_by(cell)
    for other in (
        {"mode": ENCODER_DP},
        {"encoder_tp": 1},
        {"pp": 2, "dp": 1},
        {"dp": 1},
        {"ep": 2},
    ):
        assert not layout.is_run_by(replace(cell, **other))


def test_a_sample_has_cells_of_every_model_and_mode(cells):
    few = sample(cells, 3, seed=1)
    assert {cell.model for cell in few} == set(MODELS)  # the first of them
    assert {cell.mode for cell in few} == set(MODES)
    counts = Counter((cell.model, cell.mode) for cell in sample(cells, 48, seed=1))
    assert set(counts.values()) == {2}
    assert len(counts) == 24


def test_a_sample_has_cells_of_every_model(cells):
    chosen = sample(cells, 8, seed=3)
    assert chosen == sample(cells, 8, seed=3)
    assert chosen != sample(cells, 8, seed=4)
    assert {cell.model for cell in chosen} == {*MODELS, *MORE_MODELS, *HEARING_MODELS}
    assert len(set(chosen)) == 8
    assert sorted(sample(cells, 10**6, seed=0)) == sorted(cells)
