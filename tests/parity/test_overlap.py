"""The parity matrix's cells with the overlapped schedule, and comparison bit by bit."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from rich.console import Console

from loongplug.training.flags import read_command_line
from loongplug.verify.flags import LAYOUT
from parity.bits import RankBits, first_difference
from parity.cells import ENCODER_DP, FULL, UNIFORM
from parity.matrix import run_cells
from parity.overlap_cells import KEPT, OverlapCell, overlap_cells

CELL = OverlapCell(model="qwen3_vl_moe_tiny", dp=2, ep=2, kept="both", shared_experts=True)
BITS = RankBits(
    losses=[1.0], norms=[2.0], gradients=[{"w": 3}], parameters={"w": 4}, images=[False]
)


@pytest.mark.slow
def test_a_cell_agrees_and_a_run_that_is_other_by_a_bit_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(OverlapCell, "flags", with_another_rate(OverlapCell.flags))
    other = replace(CELL, sequence_parallel=False, optimizer="distributed")
    right, wrong = run_cells([CELL, other], folder=tmp_path, console=Console(stderr=True), jobs=1)
    assert right.agrees, right
    assert right.gradients, "something was compared"
    assert not wrong.agrees
    assert wrong.failed is None
    assert wrong.bits == "losses of rank 0 differ", "those of the second step"


def with_another_rate(flags):
    """Those of a distributed optimizer learn by a bit more."""

    def given(self):
        more = ["--lr", "1.0001e-4"] if self.optimizer == "distributed" else []
        return [*flags(self), *more]

    return given


@pytest.mark.quick
class TestWithoutRuns:
    @pytest.mark.not_quick
    def test_every_mode_pipeline_and_ep_meet(self):
        cells = overlap_cells()
        modes = [(UNIFORM, 1, 1), (UNIFORM, 1, 2), (ENCODER_DP, 1, 2), (FULL, 1, 1), (FULL, 1, 2)]
        assert {((c.mode, c.encoder_tp, c.tp), (c.pp, c.vpp), c.ep) for c in cells} >= set(
            product(modes, [(1, 1), (2, 2)], [2, 4])
        )
        for other in ("delayed", "trained", "mode", "shared_experts"):
            met = {(cell.kept, getattr(cell, other)) for cell in cells}
            assert met == set(product(KEPT, {getattr(cell, other) for cell in cells})), other
        assert all(cell.possible for cell in cells)

    @pytest.mark.not_quick
    def test_flags_of_a_cell_and_of_its_twin(self):
        cell = replace(CELL, delayed=True, trained="all but the encoder")
        args = read_command_line(cell.flags()).args
        assert args.overlap_moe_expert_parallel_comm
        assert args.delay_wgrad_compute
        assert set(args.recompute_modules) >= {"a2a_overlap_attn", "a2a_overlap_mlp"}
        assert "dispatched_input" in args.offload_tensors
        twin = read_command_line(cell.twin_flags()).args
        assert not twin.overlap_moe_expert_parallel_comm
        assert not twin.delay_wgrad_compute
        assert twin.recompute_granularity is None
        assert twin.expert_model_parallel_size == 2
        assert not twin.offload_tensors
        assert "overlap_moe_expert_parallel_comm" in LAYOUT
        other = replace(cell, shared_experts=False)
        assert cell.sizes().keys() - other.sizes().keys() == {
            "foundation.shared_expert_ffn_hidden_size"
        }
        assert cell.reference != other.reference
        assert set(KEPT) == {"all", "nodes recomputed", "tensors away", "both"}

    @pytest.mark.parametrize(
        ("what", "value"),
        [
            ("losses", [1.0000001]),
            ("norms", [2.1]),
            ("gradients", [{"w": 5}]),
            ("parameters", {"w": 5}),
        ],
    )
    def test_any_other_bit_is_found(self, what, value):
        other = replace(BITS, **{what: value})
        assert first_difference([BITS, other], [BITS, BITS]) == f"{what} of rank 1 differ"

    def test_nodes_are_no_bits(self):
        assert first_difference([replace(BITS, nodes=Counter(mlp=3))], [BITS]) == ""
