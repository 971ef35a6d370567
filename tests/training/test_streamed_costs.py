"""What a step that may stream is counted to take: by parts as much as a model's step in one."""

from pathlib import Path
from typing import Any

import pytest
from command_lines import command_line

from loongplug.models.amounts import ModelAmounts
from loongplug.models.entries import encoders
from loongplug.training.arguments import parse_arguments
from loongplug.training.freezing import freezing_of
from loongplug.training.streamed_costs import streamed_costs

pytestmark = pytest.mark.quick

GRIDS = [(1, 4, 4), (1, 8, 4), (2, 4, 4)]
NAME = "image_encoder"
PP2 = ("--pipeline-model-parallel-size", "2")
STREAMED = ("--enable-full-hetero-dp", "--full-hetero-dp-schedule", "streamed")
FROZEN = ("model.image_encoder.freeze=true", "model.image_projector.freeze=true")
RECOMPUTED = ("model.image_encoder.recompute=true",)


def counted(folder: Path, *flags: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The costs, the count of the whole step, and the arguments."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    parsed = parse_arguments(command_line(folder, *PP2, *STREAMED, *flags))
    (entry,) = encoders(parsed.model.entries())
    hugging_face = parsed.family.load_hugging_face(parsed.model)
    trains = freezing_of(parsed.args, parsed.model).trains
    work = ModelAmounts.of(parsed.model, hugging_face, trains=trains)
    return streamed_costs(parsed.args, parsed.model, entry=entry), work, parsed.args


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ()),
        (2, ("--num-virtual-stages-per-pipeline-rank", "2")),
        (4, ("--tensor-model-parallel-size", "2")),
        (2, FROZEN),
        (2, ("model.image_encoder.freeze=true",)),
        (2, ("+model.image_encoder.lora.rank=4",)),
    ],
)
def test_parts_add_up_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, flags: tuple[str, ...]
) -> None:
    costs, work, args = counted(tmp_path, *flags, ranks=ranks, monkeypatch=monkeypatch)
    piece = costs.of_media(GRIDS)
    assert sum(piece) == pytest.approx(work.of_samples((), {NAME: GRIDS}), rel=1e-6)
    assert bool(piece.backward) == costs.of_passes.trains == (flags != FROZEN)
    # Of media together as much as of each: attention is within a frame.
    alone = [costs.of_media([grid]) for grid in GRIDS]
    assert sum(each.forward for each in alone) == pytest.approx(piece.forward, rel=1e-6)
    rows = [args.seq_length] * args.micro_batch_size
    text = work.of_samples(rows, {})
    found = sum(costs.forward) + sum(costs.backward)
    assert found * args.tensor_model_parallel_size == pytest.approx(text, rel=1e-6)
    assert len(costs.forward) == 2 * (args.virtual_pipeline_model_parallel_size or 1)


def test_recompute_is_one_forward_of_the_layers_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = counted(tmp_path, ranks=2, monkeypatch=monkeypatch)
    again, _, _ = counted(tmp_path, *RECOMPUTED, ranks=2, monkeypatch=monkeypatch)
    one, other = plain.of_media(GRIDS), again.of_media(GRIDS)
    assert one.forward == other.forward
    assert one.backward < other.backward <= one.backward + one.forward


def test_a_speed_is_the_encoders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _ = counted(tmp_path, ranks=2, monkeypatch=monkeypatch)
    flags = ("--full-hetero-dp-encoder-speed", "0.5")
    slow, _, _ = counted(tmp_path, *flags, ranks=2, monkeypatch=monkeypatch)
    assert slow.of_media(GRIDS) == tuple(2 * each for each in plain.of_media(GRIDS))
    assert (slow.forward, slow.backward) == (plain.forward, plain.backward)


def test_a_step_that_does_not_stream_is_assigned_as_the_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are held against that: in turn, or by cost."""
    units = [[(1, 8, 8)] * 4, [(1, 2, 2)], [(1, 8, 8)] * 4, [(1, 2, 2)]]
    plain, _, _ = counted(tmp_path, ranks=2, monkeypatch=monkeypatch)
    in_turn = plain.assigned(units, 2)
    assert [share.encoder_replica for (share,) in in_turn] == [0, 1, 0, 1]
    even, _, _ = counted(tmp_path, "--use-vit-dp-balance", ranks=2, monkeypatch=monkeypatch)
    owners = [share.encoder_replica for (share,) in even.assigned(units, 2)]
    assert owners[0] != owners[2]
    assert owners[1] != owners[3]


def test_units_share_passes_unless_their_activations_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step does not stream."""
    rows = "+model.image_encoder.joined_rows=96"
    plain, _, _ = counted(tmp_path, rows, ranks=2, monkeypatch=monkeypatch)
    assert plain.joined_rows == 96
    moved, _, _ = counted(
        tmp_path, rows, "--offload-encoder-activations", ranks=2, monkeypatch=monkeypatch
    )
    assert moved.joined_rows is None


def test_an_uneven_split_is_that_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--decoder-first-pipeline-num-layers", "1")
    costs, _, args = counted(tmp_path, *flags, ranks=2, monkeypatch=monkeypatch)
    first, last = costs.forward
    assert last > (args.num_layers - 1) * first > 0
    layout = ("--pipeline-model-parallel-layout", "Et|t*3L")
    found, _, _ = counted(tmp_path, *layout, ranks=2, monkeypatch=monkeypatch)
    assert found.forward == costs.forward


def test_a_pass_takes_something_and_holds_as_many_rows_as_full_separation_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass more is worth it where it fills a wait that is longer, for every layer."""
    plain, _, _ = counted(tmp_path, ranks=2, monkeypatch=monkeypatch)
    assert plain.of_passes.each.backward == 2 * plain.of_passes.each.forward > 0
    deep = ("model.image_encoder.num_layers=11",)
    deeper, _, _ = counted(tmp_path, *deep, ranks=2, monkeypatch=monkeypatch)
    assert deeper.of_passes.each.forward > plain.of_passes.each.forward
    frozen, _, _ = counted(tmp_path, *FROZEN, ranks=2, monkeypatch=monkeypatch)
    assert frozen.of_passes.each == (plain.of_passes.each.forward, 0)
    few = ("+model.image_encoder.joined_rows=64",)
    fewer, _, _ = counted(tmp_path, *few, ranks=2, monkeypatch=monkeypatch)
    row = plain.of_media([(1, 8, 8)]).forward / 64
    assert 0 < fewer.of_passes.joined <= 64 * row
    assert plain.of_passes.joined == pytest.approx(fewer.of_passes.joined * 16384 / 64)
