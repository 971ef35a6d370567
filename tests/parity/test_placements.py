"""Which cells the parity matrix has of encoders on ranks of their own, and what their rows keep."""

import json
from dataclasses import replace

import pytest

from loongplug.data.sample_order import epoch_permutation
from loongplug.training.flags import read_command_line
from parity.matrix import kept_media
from parity.placement_cells import (
    PUBLISHED_MODELS,
    ROWS,
    TWO,
    PlacementCell,
    placed,
    placement_cells,
)
from parity.published import A7, A8

pytestmark = pytest.mark.quick


def sizes(cell: PlacementCell) -> str:
    return f"{cell.tp}/{cell.pp}/{cell.dp}|{cell.own}"


def test_both_published_tables_are_cells_of_each_model():
    cells = placement_cells()
    for model in PUBLISHED_MODELS:
        frozen, trained = (
            [cell for cell in cells if (cell.model, cell.table) == (model, table)]
            for table in ("A7", "A8")
        )
        assert [sizes(cell) for cell in frozen] == [*A7]
        assert [sizes(cell) for cell in trained] == [*A8]
        assert {(cell.ranks, cell.micro_batch) for cell in frozen} == {(8, 1)}
        assert {(cell.ranks, cell.micro_batch) for cell in trained} == {(8, 2)}
        assert all("model.foundation.freeze=true" in cell.shared_flags() for cell in frozen)
        assert not any("freeze" in flag for cell in trained for flag in cell.shared_flags())


def test_replicas_of_both_sides_are_in_the_ratios_that_were_asked_for():
    found = {(cell.own_sizes[0][2], cell.dp) for cell in placement_cells()}
    assert found >= {(3, 2), (2, 3), (4, 1), (1, 4)}
    assert {cell.rows for cell in placement_cells()} == {*ROWS}


def test_encoders_with_stages_stand_beside_what_others_do():
    cells = [cell for cell in placement_cells() if any(pp > 1 for _, pp, _ in cell.own_sizes)]
    ratios = {(cell.own_sizes[0][2], cell.dp) for cell in cells}
    assert ratios >= {(3, 2), (2, 3), (3, 1), (1, 4)}
    assert {cell.rows for cell in cells} == {*ROWS}
    assert (
        {"moe" in cell.model for cell in cells} == {cell.overlap for cell in cells} == {True, False}
    )
    assert {len(cell.encoders) for cell in cells} == {1, 2}


def test_flags_say_where_encoders_lie_and_the_single_rank_knows_nothing_of_it():
    cell = placed("1/2/2|1/1/3|2/1/1", model=TWO, micro_batch=3, vpp=2)
    line = read_command_line(cell.flags())
    assert line.args.pipeline_model_parallel_size == 2
    assert line.overrides == (
        "model.image_encoder.rank_offset=4",
        "model.image_encoder.tensor_model_parallel_size=1",
        "model.image_encoder.data_parallel_size=3",
        "model.audio_encoder.rank_offset=7",
        "model.audio_encoder.tensor_model_parallel_size=2",
        "model.audio_encoder.data_parallel_size=1",
    )
    assert cell.ranks == 9
    shared = read_command_line(cell.shared_flags())
    assert (shared.args.micro_batch_size, shared.args.global_batch_size) == (3, 24)
    assert not shared.overrides
    other = replace(cell, micro_batch=1)
    assert cell.reference != other.reference
    staged = placed("1/1/1|1/2/1", model="qwen3_vl_tiny")
    assert "model.image_encoder.pipeline_model_parallel_size=2" in staged.flags()


@pytest.mark.parametrize("rows", ROWS)
def test_rows_keep_the_media_that_the_cell_says(tmp_path, rows):
    content = [{"type": kind, kind: "x"} for kind in ("image", "audio", "text")]
    message = {"messages": [{"role": "user", "content": content}]}
    lines = [json.dumps(message | {"number": number}) for number in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    cell = placed("1/1/1|1/1/1|1/1/1", model=TWO, rows=rows)
    kept = kept_media(tmp_path / "train.jsonl", cell)
    assert kept.parent == tmp_path  # where the media are
    samples = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [each["number"] for each in samples] == list(range(20))
    order = epoch_permutation(20, seed=1234, epoch=0)
    media = [
        [part["type"] for part in samples[number]["messages"][0]["content"]] for number in order
    ]
    first, then = {
        "whole": (["image", "audio", "text"],) * 2,
        "text": (["text"],) * 2,
        "text first": (["text"], ["image", "audio", "text"]),
        "images": (["image", "text"],) * 2,
        "sounds": (["audio", "text"],) * 2,
    }[rows]
    assert media == [first] * cell.batch + [then] * (20 - cell.batch)
