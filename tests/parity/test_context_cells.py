"""Which cells the parity matrix has of rows that lie on several ranks."""

from itertools import product

import pytest

from loongplug.training.flags import read_command_line
from loongplug.verify.flags import LAYOUT
from parity.cells import FULL, MODELS, pairs
from parity.context_cells import (
    APART,
    COMM_TYPES,
    CONTEXT_MODES,
    CPS,
    OVERLAPPED,
    ROWS,
    ContextCell,
    context_cells,
    possible_cells,
)
from parity.overlap_cells import KEPT
from parity.parity_page import context_page
from parity.placement_cells import TWO
from parity.results import Result

CELL = ContextCell(
    model="qwen3_vl_moe_tiny", cp=2, ep=2, rows="packs, lpt", trained="decoder's LoRA"
)


@pytest.mark.quick
class TestWithoutRuns:
    @pytest.mark.not_quick
    @pytest.mark.parametrize("model", MODELS)
    def test_every_two_values_of_two_axes_meet_where_they_can(self, model):
        every = [cell for cell in context_cells() if cell.model == model]
        mine = [cell for cell in every if type(cell) is ContextCell]
        met = {pair for cell in mine for pair in pairs(cell)}
        assert met == {pair for cell in possible_cells(model) for pair in pairs(cell)}
        assert {(cell.cp, cell.rows) for cell in mine} == set(product(CPS, ROWS))
        # There are four key/value heads.
        possible = set(product(CPS, COMM_TYPES)) - {(3, "a2a")}
        assert {(cell.cp, cell.comm) for cell in mine} == possible
        assert {(cell.mode, cell.cp) for cell in mine} == set(product(CONTEXT_MODES, CPS))
        assert {cell.away for cell in mine if cell.mode == FULL} == {"nothing", "all three"}

    def test_some_stream(self):
        streams = [cell for cell in context_cells() if cell.streams]
        assert {cell.rows for cell in streams} == {*ROWS}
        assert {cell.comm for cell in streams} == {*COMM_TYPES}
        for cell in streams:
            args = read_command_line(cell.flags()).args
            assert args.full_hetero_dp_schedule == "streamed"
            assert (cell.ranks, args.context_parallel_size) == (4, 2)
            assert cell.possible
            assert cell.can_communicate
            result = Result(cell=cell, failed="so")
            assert "| full-hetero-dp, streamed |" in context_page([result], 91, "c0de")

    def test_some_overlap_the_experts_exchange(self):
        """In every mode, with each split and way to come by keys, and each thing that is kept."""
        assert {cell.mode for cell in OVERLAPPED} == {*CONTEXT_MODES}
        assert {cell.rows for cell in OVERLAPPED} == {*ROWS}
        assert {cell.comm for cell in OVERLAPPED} == {*COMM_TYPES}
        assert {cell.kept for cell in OVERLAPPED} == {*KEPT}
        assert {(cell.pp, cell.vpp) for cell in OVERLAPPED} == {(1, 1), (2, 2)}
        assert {*OVERLAPPED} < {*context_cells()}
        for cell in OVERLAPPED:
            args, twin = (
                read_command_line(each).args for each in (cell.flags(), cell.twin_flags())
            )
            assert (args.overlap_moe_expert_parallel_comm, args.context_parallel_size) == (
                True,
                twin.context_parallel_size,
            )
            assert not twin.overlap_moe_expert_parallel_comm
            assert cell.possible
            assert cell.can_communicate
            result = Result(cell=cell, bits="losses of rank 0 differ", loss=0.0)
            page = context_page([result, Result(cell=CELL, failed="so")], 98, "c0de")
            plain, table = page.split(f"## {cell.model}, experts' exchange overlapped")
            assert "| **differ** |" in table
            assert CELL.trained in plain

    def test_two_encoders_are_in_every_mode(self):
        mine = [cell for cell in context_cells() if cell.model == TWO]
        assert {(cell.mode, cell.cp) for cell in mine} == set(product(CONTEXT_MODES, CPS))
        assert {(cell.mode, cell.rows) for cell in mine} == set(product(CONTEXT_MODES, ROWS))

    def test_encoders_of_their_own_ranks_lie_behind_the_decoders(self):
        cell = ContextCell(model=TWO, mode=APART, own="2/1/1|1/1/2", cp=3)
        assert (cell.decoder_ranks, cell.ranks) == (3, 7)
        offsets = [each for each in cell.flags() if "rank_offset" in each]
        assert [each.split("=")[1] for each in offsets] == ["3", "5"]

    def test_the_single_rank_packs_and_has_whole_rows(self):
        shared, args = (read_command_line(each) for each in (CELL.shared_flags(), CELL.flags()))
        assert shared.args.packing
        assert (args.args.context_parallel_size, args.args.cp_balance) == (2, "lpt")
        assert not {"context_parallel_size", "cp_balance", "cp_comm_type"} & shared.flags.keys()
        assert {"context_parallel_size", "cp_balance", "cp_comm_type"} <= LAYOUT
        assert CELL.divides % (2 * CELL.cp) == 0
