"""``loongplug partition``: what it prints and refuses, and runs with the flags that it gives."""

import json
import re
import shlex
from collections import Counter

import pytest
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.ranks import as_rank
from loongplug.estimate.run_of_flags import parsed_for
from loongplug.partition.splits import LAYOUT

pytestmark = pytest.mark.quick

RUN = [
    *("--visual-tokens", "64", "--model-name", "qwen3_vl_tiny", "--training-phase", "sft"),
    *("--seq-length", "256", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--train-iters", "1", "--lr", "1e-3"),
]
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")
PP3 = ("--pipeline-model-parallel-size", "3")  # which do not divide the four layers


def run(*options, ranks=3):
    return CliRunner().invoke(app, ["partition", "--ranks", str(ranks), *RUN, *options])


@pytest.mark.parametrize(
    ("layers", "replaced"),
    [
        (6, ("--decoder-first-pipeline-num-layers", "2")),
        (7, VIRTUAL),
        (9, ("--num-layers-per-virtual-pipeline-stage", "2")),
        (9, (LAYOUT, "Et|t|t|t|t|t*4L")),
    ],
)
def test_stages_and_flags(tmp_path, layers, replaced):
    figures = tmp_path / "figures.json"
    sizes = (*PP3, "--global-batch-size", "9", f"model.foundation.num_layers={layers}")
    result = run(*sizes, *replaced, "--json", str(figures), "model.image_encoder.freeze=true")
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    assert written["microbatches"] == 9
    aware, plain = (written["splits"][name] for name in ("frozen-aware", "plain"))
    chunks = 1 if layers == 6 else 2
    assert [each["entry"] for each in aware["stages"]] == ["text_decoder"] * 3 * chunks
    assert aware["step"] <= plain["step"]
    flag, layout = written["flags"]
    assert f"{flag} {shlex.quote(layout)} (in the place of {replaced[0]})" in result.output
    assert "image_encoder + text_decoder 0" in result.output
    loads = Counter()
    for each in aware["stages"]:
        loads[each["stage"]] += each["forward"] + each["backward"]
    assert aware["step"] >= 9 * max(loads.values())
    # A run with these flags builds those stages.
    parsed = parsed_for([*RUN[2:], *sizes, *written["flags"]], ranks=3, stand_ins=tmp_path)
    built = []
    for rank in range(3):
        with as_rank(parsed, rank) as one:
            built.append([len(each.text_decoder.decoder.layers) for each in one.chunks])
    found = [each["layers"] for each in aware["stages"]]
    assert built == [found[rank::3] for rank in range(3)]


@pytest.mark.parametrize("freeze", ["true", "false"])
def test_modes_are_compared_on_the_same_work(tmp_path, freeze):
    """All ranks together do as much of a step in either; full separation spreads the encoder."""
    work = {}
    for mode in ("uniform", "full_hetero_dp"):
        figures = tmp_path / f"{mode}.json"
        flags = (*PP3, f"model.image_encoder.mode={mode}", f"model.image_encoder.freeze={freeze}")
        result = run(*flags, "--json", str(figures))
        assert result.exit_code == 0, result.output
        written = json.loads(figures.read_text())
        split = written["splits"]["plain"]
        stages = sum(each["forward"] + each["backward"] for each in split["stages"])
        work[mode] = written["microbatches"] * stages + 3 * split["outside"]
        assert (split["outside"] > 0) == (mode == "full_hetero_dp")
    assert work["full_hetero_dp"] == pytest.approx(work["uniform"], rel=1e-3)


def test_encoders_with_stages_of_their_own_and_around_the_schedule(tmp_path):
    figures = tmp_path / "figures.json"
    model = ("--model-name", "qwen2_5_omni_tiny")
    around = "model.audio_encoder.mode=full_hetero_dp"
    stages = ("--encoder-stages", "image_encoder=2")
    result = run(*model, around, *stages, "--json", str(figures), ranks=1)
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    names = [each["entry"] for each in written["splits"]["plain"]["stages"]]
    assert names == ["image_encoder", "image_encoder", "text_decoder"]
    assert written["flags"] == []  # one stage of the decoder
    (sizes,) = written["encoder_stages"].values()
    assert f"image_encoder: {sizes[0]} + {sizes[1]} layers" in result.output
    assert "audio_encoder works on all stages before and behind the schedule" in result.output
    assert not re.search(r"\+ text_decoder 0", result.output)


@pytest.mark.parametrize(("pp", "stages"), [(1, 1), (2, 2)])
def test_an_encoder_on_ranks_of_its_own_is_a_side_of_the_step(tmp_path, pp, stages):
    figures = tmp_path / "figures.json"
    sizes = ("--pipeline-model-parallel-size", str(pp), f"model.image_encoder.rank_offset={pp}")
    given = () if stages == 1 else ("--encoder-stages", f"image_encoder={stages}")
    result = run(*sizes, *given, "--json", str(figures), ranks=pp + 1)
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    aware, count = written["splits"]["frozen-aware"], written["microbatches"]
    names = [each["entry"] for each in aware["stages"]]
    assert names == ["image_encoder"] * stages + ["text_decoder"] * pp
    assert not re.search(r"\+ text_decoder 0", result.output)
    # Forward and backward of a microbatch on the slowest stage of each side.
    sides = {
        name: max(
            each["forward"] + each["backward"] for each in aware["stages"] if each["entry"] == name
        )
        for name in names
    }
    slowest = max(sides, key=sides.get)
    assert f"the slowest stage, which decides, is of {slowest}" in result.output
    assert count * sides[slowest] < aware["step"] <= (count + pp + stages - 1) * sides[slowest]
    if pp == stages == 1:
        assert written["alone"] == {name: count * each for name, each in sides.items()}
        assert written["flags"] == []
    assert max(written["alone"].values()) < aware["step"]


def test_all_stages_know_that_a_boundary_falls_among_the_deepstack_features(tmp_path):
    """Megatron asked of the first stage's layers tells a rank its own, where there is a layout."""
    announced = []
    for layout in ("Et|t*3L", "Et*2|t*2L"):  # two features travel
        flags = [*RUN[2:], "--pipeline-model-parallel-size", "2", LAYOUT, layout]
        parsed = parsed_for(flags, ranks=2, stand_ins=tmp_path)
        for rank in range(2):
            with as_rank(parsed, rank) as one:
                announced.append(one.chunks[0].text_decoder.config.variable_seq_lengths)
    assert announced == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--pipeline-model-parallel-size is 1, so that there are no stages"),
        (("--pipeline-model-parallel-size", "5"), "Number of layers should be divisible by"),
        ((*PP3, *VIRTUAL), "text_decoder: 4 layers cannot be split into 6 stages"),
        (
            ("--encoder-stages", "image_encoder=1", "--global-batch-size", "9", *VIRTUAL),
            "When interleaved schedule is used, pipeline-model-parallel size should be",
        ),
        (
            (
                *PP3,
                LAYOUT,
                "Et|t|t|t|t|tL",
                "--global-batch-size",
                "7",
                "model.foundation.num_layers=6",
            ),
            "7 microbatches a step do not fill the interleaved schedule",
        ),
        ((*PP3, "--encoder-stages", "ears=2"), "--encoder-stages ears=2: expected NAME=N, with"),
        ((*PP3, "--encoder-stages", "image_encoder=0"), "one of image_encoder and how many"),
        ((*PP3, "--encoder-stages", "image_encoder=4"), "image_encoder: 3 layers cannot be split"),
        ((*PP3, "--model-nam", "x"), "there is no flag --model-nam"),
        (("--ranks", "0"), "--ranks is 0: expected"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(options, said):
    ranks = 5 if "5" in options else 3
    result = run(*options, ranks=ranks)
    assert result.exit_code == 1
    assert said in result.output
