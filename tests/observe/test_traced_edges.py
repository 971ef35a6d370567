"""Traced runs in which features travel: who sent what to whom, as spans and as arrows."""

import json
from collections import Counter

import pytest
from ranks import run_ranks

from loongplug.observe.command import trace
from loongplug.observe.trace_file import read_folder
from loongplug.training.run import run

MICROBATCHES = 4
APART = ("model.image_encoder.rank_offset=1", "model.image_encoder.data_parallel_size=2")
FULL = (
    "--enable-full-hetero-dp",
    "--full-hetero-dp-schedule",
    "separated",
    "--pipeline-model-parallel-size",
    "2",
)


def steps(rank: int, *, flags: list[str]) -> int:
    return len(run(flags))


@pytest.fixture(scope="module")
def apart(flags, tmp_path_factory):
    """The folder of a step with two replicas of an encoder, which make a sample each."""
    folder = tmp_path_factory.mktemp("trace")
    given = [*flags, "--train-iters", "1", *APART, "--trace", str(folder)]
    assert run_ranks(steps, 3, flags=given) == [1, 1, 1]
    return folder


def messages(folder, name: str) -> Counter[tuple[int, int, int, int]]:
    """Source, target, microbatch and bytes of all events of a name."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    for one in read_folder(folder):
        for each in (each for each in one.events if each.name == name):
            assert (each.phase, each.step) == ("exchange", 1)
            known = each.details
            ends = known.get("source", one.rank), known.get("target", one.rank)
            found[*ends, known["microbatch"], known["bytes"]] += 1
    return found


def test_each_message_is_sent_once_and_received_once(apart):
    features, gradients = messages(apart, "send features"), messages(apart, "send gradients")
    assert features == messages(apart, "receive features")
    assert gradients == messages(apart, "receive gradients")
    assert set(features.values()) == {1}
    assert {target for _, target, *_ in features} == {0}
    assert {source for source, *_ in features} == {1, 2}
    assert {number for _, _, number, _ in features} == set(range(MICROBATCHES))
    assert gradients == Counter({(t, s, *rest): 1 for s, t, *rest in features})


def test_what_goes_between_stages_of_an_encoder_is_seen(flags, tmp_path):
    staged = (APART[0], "model.image_encoder.pipeline_model_parallel_size=2")
    given = [*flags, "--train-iters", "1", *staged, "--trace", str(tmp_path)]
    assert run_ranks(steps, 3, flags=given) == [1, 1, 1]
    states = messages(tmp_path, "send states")
    assert states == messages(tmp_path, "receive states")
    assert {(source, target) for source, target, *_ in states} == {(1, 2)}
    assert {number for _, _, number, _ in states} == set(range(MICROBATCHES))
    back = messages(tmp_path, "send gradients")
    assert back == messages(tmp_path, "receive gradients")
    assert {(source, target) for source, target, *_ in back} == {(0, 2), (2, 1)}
    assert {key for key in back if key[0] == 2} == {(t, s, *rest) for s, t, *rest in states}


def test_arrows_lead_from_each_send_to_its_receive(apart, capsys):
    trace(apart, step=None)
    assert "Step 1: shares of each rank's time" in capsys.readouterr().out
    rows = json.loads((apart / "trace.json").read_text())["traceEvents"]
    of_edges = [row for row in rows if row["ph"] == "X" and row["cat"] == "exchange"]
    spans = [row for row in of_edges if "microbatch" in row["args"]]  # all but the wait for sends
    arrows = [row for row in rows if row["ph"] in ("s", "f")]
    starts = {row["id"]: row for row in arrows if row["ph"] == "s"}
    ends = {row["id"]: row for row in arrows if row["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) + len(ends) == len(arrows) == len(spans)
    for key, start in starts.items():
        end = ends[key]
        assert start["ts"] < end["ts"]
        assert start["args"] == end["args"]  # the microbatch
        assert start["name"] == end["name"]
        assert (start["pid"] == 0) == (start["name"] == "gradients")
        assert (end["pid"] == 0) == (end["name"] == "features")
        inside = [each for each in spans if is_within(start, each)]
        assert [each["args"]["target"] for each in inside] == [end["pid"]]
        assert [each["args"]["microbatch"] for each in inside] == [start["args"]["microbatch"]]


def is_within(arrow, span) -> bool:
    """Whether an arrow is drawn from a span."""
    same_lane = (arrow["pid"], arrow["tid"]) == (span["pid"], span["tid"])
    return same_lane and span["ts"] <= arrow["ts"] < span["ts"] + span["dur"]


def test_ranks_that_encode_and_decode_tell_of_their_exchanges(flags, tmp_path):
    run_ranks(steps, 2, flags=[*flags, "--train-iters", "1", *FULL, "--trace", str(tmp_path)])
    for one in read_folder(tmp_path):
        assert [each.name for each in one.events if each.phase == "exchange"] == ["units"] * 2
