"""Which cells the parity matrix has."""

import pytest

from loongplug.training.flags import read_command_line
from loongplug.verify.cells import (
    MODELS,
    MOST_RANKS,
    SIZES,
    Cell,
    all_cells,
    choices,
    layouts,
    matrix,
    pairs,
    sample,
)

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def cells():
    return all_cells()


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_is_run(cells, model):
    ran = {
        (cell.encoder_tp, cell.tp, cell.pp, cell.vpp, cell.dp, cell.ep)
        for cell in cells
        if cell.model == model
    }
    wanted = {
        (encoder_tp, tp, pp, vpp, dp, ep)
        for tp in SIZES
        for pp in SIZES
        for dp in SIZES
        if tp * pp * dp <= MOST_RANKS
        for vpp in (SIZES if pp > 1 else (1,))
        for encoder_tp in SIZES
        if encoder_tp <= tp
        for ep in (SIZES if "moe" in model else (1,))
        if ep <= tp * dp
    }
    assert ran == wanted


@pytest.mark.parametrize("model", MODELS)
def test_every_two_values_of_two_axes_meet_where_they_can(cells, model):
    possible = {
        pair for layout in layouts(model) for cell in choices(layout) for pair in pairs(cell)
    }
    met = {pair for cell in cells if cell.model == model for pair in pairs(cell)}
    assert met == possible


def test_the_matrix_is_the_same_every_time_and_has_no_cell_twice(cells):
    assert matrix(MODELS[0]) == [cell for cell in cells if cell.model == MODELS[0]]
    assert len({cell.name for cell in cells}) == len(cells) == len(set(cells))


def test_the_batch_fills_every_pipeline(cells):
    for cell in cells:
        microbatches, left = divmod(8, cell.dp)
        assert left == 0
        assert cell.vpp == 1 or microbatches % cell.pp == 0
        assert cell.layers % (cell.pp * cell.vpp) == 0


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
    assert Cell(model="qwen3_vl_tiny").flags() == [
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
    ]


def test_a_sample_has_cells_of_every_model(cells):
    chosen = sample(cells, 7, seed=3)
    assert chosen == sample(cells, 7, seed=3)
    assert chosen != sample(cells, 7, seed=4)
    assert {cell.model for cell in chosen} == set(MODELS)
    assert len(set(chosen)) == 7
    assert sorted(sample(cells, 10**6, seed=0)) == sorted(cells)
