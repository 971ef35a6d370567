"""Which cells the parity matrix has, and what their flags are."""

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import product

import pytest

from loongplug.data.sample_order import epoch_permutation
from loongplug.training.flags import read_command_line
from loongplug.verify.flags import LAYOUT
from parity.cells import (
    BATCH,
    EXPERTS,
    HEARING_MODELS,
    MODELS,
    MODES,
    MORE_MODELS,
    MOST_RANKS,
    TWO,
    Cell,
)
from parity.option_flags import ENCODER_DP, FLAGS, FULL
from parity.pairwise import pairs
from parity.parts import PARTS, cells_of
from parity.placed import A7, A8, PUBLISHED_MODELS, placed, published
from parity.prepared import kept_media

pytestmark = pytest.mark.quick
# Of each part, so that all of them are run in an hour or two.
MOST_CELLS = {"layouts": 680, "hearing": 40, "savings": 150, "overlap": 60, "context": 100}
MOST_CELLS |= {"streamed": 210, "placements": 110}
MOST_FEW = 20


@pytest.mark.not_quick
@pytest.mark.parametrize("name", PARTS)
def test_cells_are_the_same_every_time_and_every_two_values_meet_where_they_can(name):
    cells, part = cells_of(name), PARTS[name]
    assert [*cells] == part.cells()
    assert len({cell.name for cell in cells}) == len({*cells}) == len(cells) <= MOST_CELLS[name]
    for cell in cells:
        assert cell.possible
        assert cell.layers % (cell.pp * cell.vpp) == 0
        assert name == "placements" or cell.batch == BATCH
        assert cell.vpp == 1 or cell.microbatches % cell.pp == 0  # which fill the pipeline
        assert Cell(**json.loads(json.dumps(asdict(cell)))) == cell
    for model in part.models:
        met, could = (
            {pair for cell in each for pair in pairs(cell, part.fields)}
            for each in (
                [each for each in cells if each.model == model and each not in part.by_hand],
                part.every(model),
            )
        )
        assert met == could
    for model in part.few_models:  # every value in every mode
        mine = [cell for cell in cells if cell.model == model]
        assert len(mine) <= MOST_FEW
        met, could = (
            {(cell.mode, axis, getattr(cell, axis)) for cell in each for axis in part.fields}
            for each in (mine, part.every(model))
        )
        assert met == could


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_is_run_in_every_mode(model, mode):
    """Held against a count that knows nothing of the cells' own rule."""
    sizes = (1, 2, 4)
    ran = {
        (cell.encoder_tp, cell.tp, cell.pp, cell.vpp, cell.dp, cell.ep)
        for cell in cells_of("layouts")
        if (cell.model, cell.mode) == (model, mode)
    }
    wanted = {
        (encoder_tp, tp, pp, vpp, dp, ep)
        for tp, pp, dp in product(sizes, repeat=3)
        if tp * pp * dp <= MOST_RANKS
        for vpp in (sizes if pp > 1 else (1,))
        for encoder_tp in sizes
        if encoder_tp < tp or (encoder_tp == tp and mode != ENCODER_DP)
        for ep in (sizes if "moe" in model else (1,))
        if ep <= tp * dp
    }
    if mode == FULL:  # an encoder that makes up several whole stages
        wanted |= {
            (encoder_tp, tp, pp, 1, dp, 1)
            for tp, pp, encoder_tp in ((1, 2, 2), (1, 4, 2), (1, 4, 4), (2, 2, 4), (2, 4, 4))
            for dp in sizes
            if tp * pp * dp <= MOST_RANKS
        }
    assert ran == wanted


def test_published_tables_are_cells():
    """A7 and A8 on ranks of their own, and A8's layouts colocated, with DP doubled."""
    apart = Counter(map(published, cells_of("placements")))
    assert all(apart[f"A7 {sizes}"] == len(PUBLISHED_MODELS) for sizes in A7)
    assert all(apart[f"A8 {sizes}"] == len(PUBLISHED_MODELS) for sizes in A8)
    for model in MODELS:
        colocated = {published(cell) for cell in cells_of("layouts") if cell.model == model}
        assert colocated == {"", *(f"A8 {name}" for name in A8.values())}


def test_flags_say_what_the_cell_is_and_the_single_rank_knows_no_layout():
    cell = Cell(
        model=EXPERTS,
        mode=FULL,
        tp=2,
        pp=2,
        dp=2,
        ep=4,
        cp=2,
        sequence_parallel=True,
        recompute="both",
        optimizer="overlapped",
        trained="decoder's LoRA",
        away="all three",
        overlap=True,
        kept="tensors away",
        rows="packs, lpt",
    )
    line, shared = read_command_line(cell.flags()), read_command_line(cell.shared_flags())
    args = line.args
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (args.expert_model_parallel_size, args.context_parallel_size) == (4, 2)
    assert (args.recompute_granularity, args.cp_balance) == ("full", "lpt")
    assert args.sequence_parallel
    assert args.overlap_param_gather
    assert "dispatched_input" in args.offload_tensors
    assert "model.image_encoder.recompute=true" in line.overrides
    assert "model.image_encoder.tensor_model_parallel_size=1" in line.overrides
    assert shared.args.packing
    assert "model.image_encoder.freeze=true" in shared.overrides
    assert not shared.flags.keys() & LAYOUT
    streams = Cell(model=MODELS[0], mode=FULL, pp=2, schedule="streamed", trained=cell.trained)
    assert read_command_line(streams.flags()).args.full_hetero_dp_schedule == "streamed"
    assert streams.shared_flags()[-2:] == ["--adam-eps", "1e-3"]
    assert streams.reference != replace(streams, schedule="separated").reference


def test_every_value_of_an_option_is_in_a_cell():
    every = [cell for part in PARTS for cell in cells_of(part)]
    for axis, values in FLAGS.items():
        assert {getattr(cell, axis) for cell in every} >= values.keys()
    assert {cell.model for cell in every} == {*MODELS, *MORE_MODELS, *HEARING_MODELS}


def test_flags_say_where_encoders_lie_apart():
    cell = placed("1/2/2|1/1/3|2/2/1", model=TWO, micro_batch=3, vpp=2)
    assert read_command_line(cell.flags()).overrides == (
        "model.image_encoder.rank_offset=4",
        "model.image_encoder.tensor_model_parallel_size=1",
        "model.image_encoder.data_parallel_size=3",
        "model.audio_encoder.rank_offset=7",
        "model.audio_encoder.tensor_model_parallel_size=2",
        "model.audio_encoder.data_parallel_size=1",
        "model.audio_encoder.pipeline_model_parallel_size=2",
    )
    assert (cell.ranks, cell.batch) == (11, 24)


def test_samples_keep_the_media_that_the_cell_says(tmp_path):
    content = [{"type": kind, kind: "x"} for kind in ("image", "audio", "text")]
    line = json.dumps({"messages": [{"role": "user", "content": content}]})
    (tmp_path / "train.jsonl").write_text(f"{line}\n" * 20)
    whole, text, sounds = ["image", "audio", "text"], ["text"], ["audio", "text"]
    for media, first, then in (("text first", text, whole), ("sounds", sounds, sounds)):
        cell = placed("1/1/1|1/1/1|1/1/1", model=TWO, media=media)
        kept = kept_media(tmp_path / "train.jsonl", cell).read_text().splitlines()
        samples = [json.loads(kept[n]) for n in epoch_permutation(20, seed=1234, epoch=0)]
        found = [[part["type"] for part in each["messages"][0]["content"]] for each in samples]
        assert found == [first] * cell.batch + [then] * (20 - cell.batch)
