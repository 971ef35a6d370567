"""The matrix's data: balance makes a difference on them."""

import os
from dataclasses import replace

import pytest
from image_units import ENCODER, media_batch
from ranks import run_ranks

from loongplug.data.microbatch import Share
from loongplug.data.planned_media import Assignment
from loongplug.data.sample_order import SampleOrder, padded_slots
from loongplug.hetero.modes import balance_of
from loongplug.training.arguments import parse_arguments
from loongplug.training.datasets import DatasetProvider
from loongplug.training.provider import engine_of
from parity.cells import Cell, layout_cells
from parity.matrix import STEPS, Matrix

# The third has the encoder of qwen3_vl_tiny.
MODELS = ("qwen3_vl_tiny", "qwen2_5_vl_tiny")


def all_owners(
    rank: int, *, cells: list[Cell], flags: list[list[str]]
) -> list[list[tuple[tuple[Share, ...], ...]]]:
    return [owners(cell, argv) for cell, argv in zip(cells, flags, strict=True)]


def owners(cell: Cell, flags: list[str]) -> list[tuple[tuple[Share, ...], ...]]:
    """The owners of the units of each step, of all replicas of the decoder."""
    os.environ["WORLD_SIZE"] = str(cell.ranks)
    parsed = parse_arguments(flags)
    provider = DatasetProvider(
        parsed.args, parsed.model, engine=engine_of(parsed.args, parsed.model)
    )
    balance = balance_of(parsed.args, parsed.model.encoder(ENCODER))
    planned = []
    for replica in range(cell.dp):
        data = provider.train
        slots = padded_slots(
            SampleOrder(len(data), seed=parsed.args.seed),
            micro_batch_size=1,
            dp_ranks=(replica,),
            dp_size=cell.dp,
            consumed=0,
        )
        for _ in range(STEPS):
            rows = [next(slots).rows for _ in range(cell.microbatches)]
            grids = [media_batch(each, data.text_parts(each)).grids for each in rows]
            planned.append(balance.assign(grids, replicas=cell.encoder_replicas))
    return planned


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("model", MODELS)
def test_owners_of_balanced_cells_are_not_in_turn(matrix, model):
    """In a step of theirs at least, in every shape of units and encoder replicas."""
    cells = [cell for cell in layout_cells() if cell.balance and cell.model == model]
    shapes = {(cell.dp, cell.encoder_replicas): cell for cell in cells}
    assert set(shapes) == {(1, 2), (1, 4), (2, 2)}
    # What decides the owners, without what takes several references.
    plain = [replace(cell, vpp=1, tied=False) for cell in shapes.values()]
    flags = [[*matrix.base(cell), *cell.flags()] for cell in plain]
    (found,) = run_ranks(all_owners, 1, cells=plain, flags=flags)
    for cell, planned in zip(plain, found, strict=True):
        in_turn = Assignment(replicas=cell.encoder_replicas).of(
            range(cell.microbatches),
            [()] * cell.microbatches,
            step=cell.microbatches,
        )
        assert len(planned) == STEPS * cell.dp
        assert any(list(each) != in_turn for each in planned), (cell.name, planned)
