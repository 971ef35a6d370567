"""Which cells the parity matrix has of encoders in the pipeline's bubbles."""

from dataclasses import replace

import pytest

from loongplug.training.flags import read_command_line
from loongplug.verify.flags import LAYOUT
from parity.cells import HEARING_MODELS, MODELS, MORE_MODELS, pairs
from parity.saving_cells import TrainedCell
from parity.streamed_cells import StreamedCell, streamed_cells, streamed_layouts

pytestmark = pytest.mark.quick

CELL = StreamedCell(model="qwen3_vl_tiny", mode="full-hetero-dp", pp=2)


@pytest.mark.not_quick
def test_every_layout_of_full_separation_with_stages_streams():
    cells = streamed_cells()
    assert {cell.model for cell in cells} == {*MODELS, *MORE_MODELS, *HEARING_MODELS}
    for model in MODELS:
        mine = [cell for cell in cells if cell.model == model]
        sizes = ("encoder_tp", "tp", "pp", "vpp", "dp", "ep")
        run = {tuple(getattr(cell, size) for size in sizes) for cell in mine}
        layouts = streamed_layouts(model)
        assert run == {tuple(getattr(cell, size) for size in sizes) for cell in layouts}
        met = {pair for cell in mine for pair in pairs(cell)}
        trained = {cell.trained for cell in mine}
        assert len(trained) == 4
        optimizers = {(cell.trained, cell.optimizer) for cell in mine}
        assert len(optimizers) == 2 * len(trained) < len(met)


@pytest.mark.not_quick
@pytest.mark.parametrize("model", [*MORE_MODELS, *HEARING_MODELS])
def test_few_cells_of_other_models_have_every_value(model: str):
    mine = [cell for cell in streamed_cells() if cell.model == model]
    assert 3 <= len(mine) <= 6
    (encoders,) = {cell.encoders for cell in mine}
    assert len(encoders) == (2 if model == "qwen2_5_omni_tiny" else 1)
    every = streamed_layouts(model)
    for size in ("encoder_tp", "tp", "pp", "vpp", "dp"):
        met = {getattr(cell, size) for cell in mine}
        assert met == {getattr(cell, size) for cell in every}, size
    trained = 2 if len(encoders) == 2 else 4 if encoders == ("image_encoder",) else 1
    assert len({cell.trained for cell in mine}) == trained
    assert {cell.away for cell in mine} == {"nothing", "activations"}


def test_the_single_rank_trains_the_same_and_streams_nothing():
    args = read_command_line(CELL.flags()).args
    assert args.full_hetero_dp_schedule == "streamed"
    assert args.enable_full_hetero_dp
    assert "full_hetero_dp_schedule" in LAYOUT
    assert "--full-hetero-dp-schedule" not in CELL.shared_flags()


def test_adapters_are_held_against_a_single_rank_that_trains_as_fast():
    adapted = replace(CELL, trained="LoRA of all modules")
    assert adapted.shared_flags()[-2:] == ["--adam-eps", "1e-3"]
    assert "--adam-eps" not in CELL.shared_flags()
    assert adapted.reference != TrainedCell(model=CELL.model, trained=adapted.trained).reference
