"""Encoders on ranks of their own in an estimate: which rank is seen, and the command."""

import json
import re
from itertools import chain

import pytest
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.estimator import parsed_for
from loongplug.estimate.microbatches import own_ranks_of, pieces_of, step_of_data
from loongplug.estimate.ranks import as_rank
from loongplug.estimate.tape import ENCODER, INPUT, STATES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("sizes", "replica", "decoders"),
    [
        ("rank_offset=2", 0, [(0, range(2)), (1, range(2))]),
        ("rank_offset=2 data_parallel_size=3", 2, [(1, range(2))]),
        ("rank_offset=1 data_parallel_size=3", 1, [(0, range(1))]),
    ],
)
def test_an_encoder_is_seen_at_the_replica_with_the_most_samples(flags, sizes, replica, decoders):
    """Its pieces are those of the run, and their media those of the decoder's microbatches."""
    given = [f"model.image_encoder.{each}" for each in sizes.split()]
    offset = int(sizes.split()[0][-1])
    ranks = offset + int(sizes.split()[-1][-1] if "data" in sizes else 1)
    parsed = parsed_for([*flags, *given], ranks=ranks)
    (own,) = own_ranks_of(parsed.args, parsed.model)
    assert (own.replica, own.rank(0)) == (replica, offset + replica)
    assert [(each.decoder, each.samples) for each in own.made] == decoders
    with as_rank(parsed, own.rank(0)) as here:
        place = here.engine.encoders["image_encoder"].place
        pieces = [
            (each.decoder, each.samples) for each in place.made_by(own.rank(0), training=True)
        ]
        assert pieces == decoders
        assert not here.engine.decodes
        assert not hasattr(here.chunks[0], "text_decoder")
    encoder, step_of = parsed.model.image_encoder, step_of_data(parsed.args, parsed.model)
    units, whole = (
        [each.units["image_encoder"] for each in microbatches]
        for microbatches in (
            pieces_of(own, step_of, encoder=encoder, packed=False),
            chain(*zip(*(step_of(each) for each, _ in decoders), strict=True)),
        )
    )
    for piece, unit, (_, samples) in zip(units, whole, decoders * 99, strict=False):
        assert piece.tokens == sum(map(encoder.tokens, piece.grids)) > 0
        if samples == range(2):
            assert (piece.grids, piece.tokens) == (unit.grids, unit.tokens)
        else:
            assert piece.grids == unit.grids[: len(piece.grids)] != unit.grids
    assert len(units) == len(whole)


RUN = [
    *("estimate", "--visual-tokens", "16", "--model-name", "qwen3_vl_tiny"),
    *("--training-phase", "sft", "--seq-length", "256", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "1", "--lr", "1e-3"),
]
OWN = "model.image_encoder.rank_offset"


def estimated(*options, ranks=2):
    result = CliRunner().invoke(app, [*RUN, "--ranks", str(ranks), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_decoder_s_ranks_have_nothing_of_the_encoder(tmp_path):
    figures = tmp_path / "figures.json"
    written = ("--json", str(figures))
    shown = estimated(f"{OWN}=1", *written)
    assert "qwen3_vl_tiny, 2 rank(s)" in shown
    decoder, encoder = json.loads(figures.read_text())["stages"]
    assert (decoder["role"], decoder["rank"]) == ("decoder", 0)
    assert (encoder["role"], encoder["rank"], encoder["stage"]) == ("image_encoder", 1, 0)
    assert not {ENCODER, INPUT} & {*decoder["parts"], *decoder["most"]}
    assert "decoder activations" not in encoder["most"]
    estimated(*written, ranks=1)
    (together,) = json.loads(figures.read_text())["stages"]
    for kind in ("weights", "gradient buffers", "optimizer state"):
        assert decoder["most"][kind] + encoder["most"][kind] == together["most"][kind]
    # In fp32, weights, their gradients and two moments, of a parameter.
    assert encoder["most"]["optimizer state"] == 2 * encoder["most"]["weights"]


def test_an_encoder_s_stages_have_together_what_one_has(tmp_path):
    figures = tmp_path / "figures.json"
    written = ("--json", str(figures))
    stages = "model.image_encoder.pipeline_model_parallel_size=2"
    shown = estimated(f"{OWN}=1", stages, *written, ranks=3)
    assert STATES in shown
    _, first, last = json.loads(figures.read_text())["stages"]
    assert [(each["stage"], each["rank"]) for each in (first, last)] == [(0, 1), (1, 2)]
    assert first["role"] == last["role"] == "image_encoder"
    estimated(f"{OWN}=1", *written)
    _, whole = json.loads(figures.read_text())["stages"]
    for kind in ("weights", "gradient buffers", "optimizer state"):
        assert first["most"][kind] + last["most"][kind] == whole["most"][kind]


def test_the_fullest_rank_of_all_modules_is_what_has_to_fit(tmp_path):
    figures = tmp_path / "figures.json"
    layouts = [f"{OWN}=1", f"{OWN}=1 model.image_encoder.num_layers=60"]
    options = [option for each in layouts for option in ("--layout", each)]
    shown = estimated(*options, "--json", str(figures))
    places = re.findall(r"layout \d\W.*\W(stage 0(?: of \w+)?)\W", shown)
    assert places == ["stage 0", "stage 0 of image_encoder"]
    small, large = json.loads(figures.read_text())["layouts"]
    assert [each["role"] for each in small["stages"]] == ["decoder", "image_encoder"]
    assert small["stages"][0] == large["stages"][0]


def test_what_a_start_refuses_is_refused_here():
    result = CliRunner().invoke(app, [*RUN, "--ranks", "3", f"{OWN}=1"])
    assert result.exit_code == 1
    assert "3 ranks with rank_offset 1 and 1 rank of encoders: expected 2" in result.output
