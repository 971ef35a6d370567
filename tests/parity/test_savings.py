"""Which cells the parity matrix has of freeze, LoRA and offload."""

import pytest

from loongplug.training.flags import read_command_line
from loongplug.verify.flags import LAYOUT
from parity.cells import FULL, MODELS, MODES, pairs
from parity.saving_cells import AWAY, TRAINED, SavingCell, possible_cells, saving_cells

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def cells():
    return saving_cells()


@pytest.mark.not_quick
@pytest.mark.parametrize("model", MODELS)
def test_every_saving_meets_every_mode_and_option(cells, model):
    mine = [cell for cell in cells if cell.model == model]
    assert {(cell.trained, cell.mode) for cell in mine} >= {
        (trained, mode) for trained in TRAINED if trained != "all" for mode in MODES
    }
    assert {(cell.trained, cell.away) for cell in mine} == {
        (trained, away) for trained in TRAINED for away in AWAY
    } - {("all", "nothing")}
    assert {cell.mode for cell in mine if cell.away != "nothing"} == {FULL}
    met = {pair for cell in mine for pair in pairs(cell)}
    assert met == {pair for cell in possible_cells(model) for pair in pairs(cell)}


def test_the_single_rank_trains_the_same_and_knows_nothing_of_the_rest():
    cell = SavingCell(
        model="qwen3_vl_tiny", mode=FULL, pp=2, trained="decoder's LoRA", away="all three"
    )
    assert cell.name == "qwen3_vl_tiny-full-hetero-dp-e1t1p2v1d1x1-plain-recompute-none" + (
        "-decoder-LoRA-away-all-three"
    )
    shared = read_command_line(cell.shared_flags())
    assert "model.image_encoder.freeze=true" in shared.overrides
    assert "+model.foundation.lora.rank=4" in shared.overrides
    args = read_command_line(cell.flags()).args
    for name in ("full_hetero_dp_cpu_offload", "offload_encoder_activations"):
        assert getattr(args, name)
        assert not getattr(shared.args, name)
        assert name in LAYOUT
    assert args.offload_encoder_state
    patterns = SavingCell(model="qwen3_vl_tiny", trained="norms, biases, last layer")
    args = read_command_line(patterns.shared_flags()).args
    assert args.freeze_parameters == ["*"]
    assert "*.bias" in args.train_parameters
    assert not set(patterns.flags()) & {"--freeze-parameters", "--train-parameters"}
