"""Encoders on ranks of their own in an estimate: the plan's units in flight, and the command."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.estimate.encoded_units import EncodedUnits, UnitCosts
from loongplug.estimate.encoder_bytes import EncoderBytes
from loongplug.estimate.estimator import parsed_for
from loongplug.estimate.ledger import (
    ENCODER,
    FEATURE_GRADIENTS,
    FEATURES,
    INPUT,
    STATE_GRADIENTS,
    STATES,
    Ledger,
)
from loongplug.estimate.own_ranks import own_ranks_of
from loongplug.estimate.ranks import as_rank
from loongplug.estimate.trace import UnitBytes
from loongplug.estimate.units import UnitSize, microbatches_of_data, own_units_of_data
from loongplug.estimate.wire_bytes import WireBytes
from loongplug.hetero.carrier import StageLink, StageSpec, stage_ends
from loongplug.hetero.crossings import apart_crossings
from loongplug.hetero.operations import BEGIN, END, Cargo, forward, gradient
from loongplug.hetero.pipeline_graph import ahead
from loongplug.hetero.placement import ApartEdge, ApartPiece
from loongplug.hetero.policies import EncoderStep, apart

pytestmark = pytest.mark.quick

KEPT, FORWARD, BACKWARD = 1000, 1500, 700
TOKENS, ROWS, PAYLOAD, ROW = 3, 4, 10, 2
LEADER = 10  # the first rank of the encoder's last stage


def encoder_step(*, microbatches, warmup, pieces=1, trains=True):
    return EncoderStep(
        encoder_replicas=((0,),) * microbatches * pieces,
        replicas=1,
        replica=0,
        consumes=False,
        training=True,
        trains=trains,
        last_stage=True,
        pieces=pieces,
        warmup=warmup,
    )


def encoder_end(step, *, rank=LEADER, **options):
    """Units of TOKENS and ROWS each, which keep KEPT bytes where they train."""
    units = [UnitSize(grids=((1, 2, 2),), row_tokens=(TOKENS,))] * len(step.encoder_replicas)
    made = [apart_piece(encoders=(LEADER, LEADER + 1), decoder=each) for each in range(step.pieces)]
    return side_of(step, units, rank=rank, pieces=made, **options)


def side_of(step, units, *, rank, pieces, links=(None, None), keeps=False, **encoded):
    """``links`` are to the stages before and behind."""
    kept, count = KEPT if step.trains else 0, len(units)
    cost = UnitBytes(kept=kept, forward=FORWARD, backward=BACKWARD, keeps_input=keeps)
    costs = UnitCosts(blank=cost, blank_rows=ROWS, largest=cost, largest_rows=ROWS)
    options = {"row": ROW, "blank_input": 0, "width": PAYLOAD, "dtype": torch.uint8}
    encoded = EncodedUnits(units=units, costs=costs, **(options | encoded))
    states = StageSpec(rows=(1,) * count, microbatches=tuple(range(count)), dtype=torch.uint8)
    wire = partial(WireBytes, rank=rank, most=step.warmup + 1, trains=step.trains)
    crossings = apart_crossings(pieces, encoded.spec(), cp=1, rank=rank)
    features = wire(crossings.ends)
    stages = wire(
        partial(stage_ends, spec=states, before=links[0], behind=links[1]),
        carries=(Cargo.STATES, Cargo.STATE_GRADIENTS),
    )
    return EncoderBytes(
        plan=apart(step),
        encoded=encoded,
        wires=(features, stages),
        crossings=crossings,
        trains_before=step.trains_before,
    )


def apart_piece(*, encoders, decoder=0, decoders=(), sample=0):
    """What goes from one replica to another."""
    ends = {"encoder_ranks": encoders, "decoder_ranks": decoders or (decoder,)}
    edge = ApartEdge(encoder=0, decoder=decoder, **ends)
    return ApartPiece(edge=edge, samples=range(sample, sample + 1))


def followed(end):
    ledger = Ledger()
    for when in (BEGIN, END):
        end.at(ledger, when)
    assert not any(ledger.live.values())  # all that was made is gone
    return ledger


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 16])
@pytest.mark.parametrize(
    "decoder",
    [
        {"pipeline": 1, "virtual": False},
        {"pipeline": 4, "virtual": False},
        {"pipeline": 2, "virtual": True},
    ],
)
def test_as_many_units_are_in_flight_as_the_plan_s_warmup_says(decoder, microbatches, pieces):
    warmup = ahead(**decoder)
    most = followed(
        encoder_end(encoder_step(microbatches=microbatches, warmup=warmup, pieces=pieces))
    ).most
    in_flight = min(microbatches, warmup + 1) * pieces
    assert most[ENCODER] == in_flight * KEPT
    received = min(microbatches * pieces, 2)  # one in use, and one posted
    assert most[FEATURE_GRADIENTS] == received * TOKENS * PAYLOAD
    assert most[INPUT] == microbatches * pieces * ROWS * ROW


# Four microbatches of one piece, two of them before the first gradient is awaited: by hand, what
# there is of activations, features and gradients within each forward and backward. A forward's
# features are there when it is done, and each send finds those before done.
BY_HAND = [
    # at work, activations of units, features of sends, receives of gradients
    ("encoder's forward", 1, 0, 1),  # 0
    ("encoder's forward", 2, 1, 1),  # 1, while 0 is sent
    ("encoder's forward", 3, 1, 1),  # 2
    ("encoder's backward", 3, 1, 2),  # of 0
    ("encoder's forward", 3, 1, 1),  # 3
    ("encoder's backward", 3, 1, 2),  # of 1
    ("encoder's backward", 2, 1, 2),  # of 2
    ("encoder's backward", 1, 1, 1),  # of 3
]


def test_a_step_by_hand(monkeypatch):
    seen = []
    work = Ledger.work

    def noted(ledger, when, transient):
        if when.startswith("encoder's"):
            live = ledger.live
            each = TOKENS * PAYLOAD
            counts = (
                live[ENCODER] // KEPT,
                live[FEATURES] // each,
                live[FEATURE_GRADIENTS] // each,
            )
            seen.append((when, *counts))
        work(ledger, when, transient)

    monkeypatch.setattr(Ledger, "work", noted)
    ledger = followed(encoder_end(encoder_step(microbatches=4, warmup=2)))
    assert seen == BY_HAND
    # Within the backward of 0: 4 units' media, 3 units' activations, one's features, 2 gradients.
    assert ledger.when == "encoder's backward"
    assert sum(ledger.peak.values()) == 4 * 4 * 2 + 3 * 1000 + 30 + 2 * 30 + 700


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_encoder_without_gradients_is_ahead_by_as_much_as_may_be_sent_at_a_time(pieces):
    """What is under way, and what is about to set out."""
    step = encoder_step(microbatches=8, warmup=2, pieces=pieces, trains=False)
    most = followed(encoder_end(step)).most
    assert most[ENCODER] == 0
    assert most[FEATURE_GRADIENTS] == 0
    assert most[FEATURES] == ((2 + 1) * pieces + 1) * TOKENS * PAYLOAD


def test_the_first_rank_of_a_replica_sends_for_the_others():
    step = encoder_step(microbatches=4, warmup=2)
    most = followed(encoder_end(step, rank=LEADER + 1)).most
    assert most[FEATURES] == most[FEATURE_GRADIENTS] == TOKENS * PAYLOAD
    assert most[ENCODER] == 3 * KEPT


GIVEN, MADE = 7, 5  # bytes of a unit's states, from the stage before and to the one behind


def stage_ledger(stage, *, trains, microbatches=8, keeps=True):
    """Of one of two stages, which train or not; the second's warm-up is 2."""
    units = microbatches
    step = replace(
        encoder_step(microbatches=units, warmup=3 - stage, trains=any(trains[: stage + 1])),
        stage=stage,
        stages=2,
        trains_before=any(trains[:stage]),
    )
    link = partial(StageLink, peer=LEADER + 9)
    if stage:
        links = link(width=GIVEN), None
        return followed(encoder_end(step, links=links, row=0, keeps=keeps))
    links = None, link(width=MADE)
    return followed(encoder_end(step, rank=LEADER - 1, links=links, states=(MADE,) * units))


def test_the_first_stage_s_states_are_held_while_they_are_sent():
    most = stage_ledger(0, trains=(True, True)).most
    assert most[ENCODER] == 4 * KEPT
    assert most[INPUT] == 8 * ROWS * ROW
    # Of the first four, two are received before any gradient comes.
    assert most[STATES] == 3 * MADE
    assert most[STATE_GRADIENTS] == 2 * MADE  # the one in use, and the one that is received ahead
    assert FEATURES not in most


def test_the_last_stage_holds_states_until_their_gradients_are_sent():
    most = stage_ledger(1, trains=(True, True)).most
    assert most[ENCODER] == 3 * KEPT
    assert most[STATES] == (3 + 2) * GIVEN  # of its own units, and two received ahead
    assert most[STATE_GRADIENTS] == 2 * GIVEN  # that which is made, and the one before
    assert most[FEATURE_GRADIENTS] == 2 * TOKENS * PAYLOAD
    assert not most[INPUT]


@pytest.mark.parametrize("keeps", [True, False])
def test_states_of_a_frozen_stage_are_there_as_long_as_something_needs_them(keeps):
    first = stage_ledger(0, trains=(False, True)).most
    assert first[ENCODER] == first[STATE_GRADIENTS] == 0
    assert first[STATES] == (4 + 1) * MADE  # nothing holds it back but the bound
    last = stage_ledger(1, trains=(False, True), keeps=keeps).most
    assert last[ENCODER] == 3 * KEPT
    assert last[STATES] == ((3 if keeps else 1) + 2) * GIVEN
    assert STATE_GRADIENTS not in last


def decoder_ledger(*, microbatches, trains, rank=0, replicas=1, stages=1):
    """Of a rank of the first of so many stages; microbatch k has (k + 1) x 100 bytes.

    So many ``replicas`` of the encoder make equal parts of them. Rank 0 receives for rank 1.
    """
    step = EncoderStep(
        encoder_replicas=((0,),) * microbatches,
        replicas=1,
        replica=None,
        consumes=True,
        training=True,
        trains=trains,
        last_stage=stages == 1,
    )
    units = [
        UnitSize(row_tokens=(100 * (number + 1) // replicas,) * replicas)
        for number in range(microbatches)
    ]
    needed = [
        apart_piece(encoders=(LEADER + each,), decoders=(0, 1), sample=each)
        for each in range(replicas)
    ]
    end = side_of(step, units, rank=rank, pieces=needed, width=1)
    ledger, works = Ledger(), []
    end.at(ledger, BEGIN)
    ahead = stages - 1
    for number in range(microbatches + ahead):
        if number < microbatches:
            end.at(ledger, forward(number))
            works.append(dict(ledger.live))
        if number >= ahead:
            end.at(ledger, gradient(number - ahead))
    end.at(ledger, END)
    assert not any(ledger.live.values())
    return ledger, works


def test_the_decoder_s_first_stage_receives_two_microbatches_ahead():
    ledger, works = decoder_ledger(microbatches=4, trains=True)
    # In the forward of 0 those of 1 and 2 are there, in that of 1 those of 2 and 3, ...
    assert [each[FEATURES] for each in works] == [500, 700, 400, 0]
    # ... and while a unit's features are taken its own, too.
    assert ledger.most[FEATURES] == 200 + 300 + 400
    # The last gradient is being sent when the next one comes.
    assert ledger.most[FEATURE_GRADIENTS] == 300 + 400
    frozen, _ = decoder_ledger(microbatches=4, trains=False)
    assert frozen.most[FEATURE_GRADIENTS] == 0


def test_a_rank_that_hears_of_features_from_its_neighbour_has_one_microbatch_s():
    ledger, works = decoder_ledger(microbatches=4, trains=True, rank=1)
    assert [each[FEATURES] for each in works] == [0] * 4
    assert (ledger.most[FEATURES], ledger.most[FEATURE_GRADIENTS]) == (400, 0)


def test_what_comes_in_pieces_is_put_together():
    ledger, _ = decoder_ledger(microbatches=2, trains=True, replicas=2)
    # Half of the second, what it is dealt into, the other half, and half of the first gradient.
    peak = 100 + 200 + 100 + 50
    assert (ledger.when, sum(ledger.peak.values())) == ("features are dealt", peak)


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
            (each.edge.decoder, each.samples) for each in place.made_by(own.rank(0), training=True)
        ]
        assert pieces == decoders
        assert not here.engine.decodes
        assert not hasattr(here.chunks[0], "text_decoder")
    units = own_units_of_data(parsed.args, parsed.model)["image_encoder"]
    first = [
        each.units["image_encoder"] for each in microbatches_of_data(parsed.args, parsed.model)
    ]
    assert len(units) == len(first) * len(decoders)
    if decoders[0] == (0, range(2)):
        assert [(each.grids, each.tokens) for each in units[::2]] == [
            (each.grids, each.tokens) for each in first
        ]


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
