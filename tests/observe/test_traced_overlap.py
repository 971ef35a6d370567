"""Whole runs with experts' exchange overlapped and traced: what computes beside each exchange."""

import json
from collections import Counter
from typing import Any

import pytest
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from ranks import run_ranks

from loongplug.observe.command import trace
from loongplug.observe.exchanges import CombinedStep, TracedExchange, combined_steps, exchanges
from loongplug.observe.trace_file import read_folder
from loongplug.training.run import run

pytestmark = pytest.mark.slow

DELAY = "--delay-wgrad-compute"
VPP2 = (
    DELAY,
    *("--pipeline-model-parallel-size", "2"),
    *("--num-virtual-stages-per-pipeline-rank", "2"),
)
SAMPLES, LAYERS, STEP = 8, 4, 1
# The other pass's node that upstream's order has beside each exchange.
PARTNERS = {
    "dispatch forward": "mlp backward",
    "combine forward": "pre_dispatch_computation backward",
    "combine backward": "pre_dispatch_computation forward",
    "dispatch backward": "mlp forward",
}


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [step.loss for step in run(flags)]


def in_turn(rank: int, *, flags: list[str]) -> list[float]:
    """The same nodes, but a layer's forward before the other layer's backward."""
    both = TransformerLayerSchedulePlan.run

    def one_after_the_other(f_layer, b_layer, f_input=None, b_grad=None, **more: Any) -> Any:
        f_input, _ = both(f_layer, None, f_input=f_input)
        _, b_grad = both(None, b_layer, b_grad=b_grad, **more)
        return f_input, b_grad

    TransformerLayerSchedulePlan.run = staticmethod(one_after_the_other)
    return losses(rank, flags=flags)


@pytest.fixture(scope="module")
def traced(flags, tmp_path_factory):
    """Runs one step on so many ranks, and gives its losses and its folder."""

    def runs(ranks: int, *more: str, function=losses):
        folder = tmp_path_factory.mktemp("overlap")
        given = [
            *flags,
            *("--model-name", "qwen3_vl_moe_tiny", "--bf16", "--use-distributed-optimizer"),
            *("--micro-batch-size", "1", "--global-batch-size", str(SAMPLES)),
            *("--train-iters", str(STEP), "--expert-model-parallel-size", "2"),
            *("--overlap-moe-expert-parallel-comm", *more, "--trace", str(folder)),
        ]
        return run_ranks(function, ranks, flags=given, timeout=290.0), folder

    return runs


def steps_of(one) -> list[CombinedStep]:
    return list(combined_steps(event for event in one.events if event.step == STEP))


def of_rank(one) -> list[TracedExchange]:
    return [each for step in steps_of(one) for each in exchanges(step)]


@pytest.mark.parametrize(("ranks", "layout"), [(2, ()), (4, VPP2)], ids=["ep2", "ep2-vpp2"])
def test_something_computes_beside_every_exchange_of_the_steady_state(
    traced, ranks, layout, capsys
):
    results, folder = traced(ranks, *layout)
    stages = 2 if layout else 1
    passes = SAMPLES // 2 * LAYERS // stages  # of a microbatch through a layer of a rank
    for one in read_folder(folder):
        found = of_rank(one)
        assert Counter(each.node.label() for each in found) == dict.fromkeys(PARTNERS, passes)
        steady = [each for each in found if each.section == "steady"]
        assert len(steady) >= 3 * len(PARTNERS)
        for each in steady:
            partner = PARTNERS[each.node.label()]
            (other,) = (other for other in each.beside if other.label() == partner)
            assert each.covered
            # Both tell what they are of; the pair is of two microbatches or of two chunks.
            assert (other.microbatch, other.chunk) != (each.node.microbatch, each.node.chunk)
            assert None not in (each.node.layer, each.node.chunk, each.node.microbatch)
        assert not any(each.covered for each in found if each.section != "steady")
        assert_nodes(one, passes=passes, layers=LAYERS // stages)
        if DELAY in layout:
            assert_covered_in_the_host_s_order(one, passes=passes)
    assert_shown(folder, capsys)
    if not layout:
        assert_an_order_without_overlap_is_found(traced, results)


def assert_nodes(one, *, passes: int, layers: int) -> None:
    """Every node is there once, within the combined step of its microbatch and chunk."""
    nodes = [event for event in one.events if event.phase == "node"]
    counts = Counter((node.name, node.details["direction"]) for node in nodes)
    assert counts["pre_dispatch_computation", "forward"] == passes
    assert counts["pre_process", "backward"] == counts["pre_process", "forward"]
    assert {node.details["layer"] for node in nodes if "layer" in node.details} <= set(
        range(1, LAYERS + 1)
    )
    assert len({node.details["layer"] for node in nodes if "layer" in node.details}) == layers
    seen = Counter((*sorted(node.details.items()), node.name) for node in nodes)
    assert set(seen.values()) == {1}
    combined = [event for event in one.events if event.phase == "forward_backward"]
    for node in nodes:
        (around,) = (one for one in combined if one.start <= node.start <= node.end <= one.end)
        prefix = "" if node.details["direction"] == "forward" else "backward_"
        for key in ("microbatch", "chunk"):
            assert node.details[key] == around.details[prefix + key]


def assert_covered_in_the_host_s_order(one, *, passes: int) -> None:
    """With the experts' weights' gradients behind it, also a dispatch has computing after it."""
    weights = [event.name for event in one.events if event.details.get("direction") == "wgrad"]
    assert Counter(weights) == {"mlp": passes, "pre_dispatch_computation": passes}
    for step in steps_of(one):
        for each in exchanges(step) if step.section == "steady" else ():
            after = step.nodes[step.nodes.index(each.node) :]
            assert any(
                other in after for other in each.beside if other.forward != each.node.forward
            )


def assert_shown(folder, capsys) -> None:
    """The table, the picture, and lanes of nodes within the combined steps."""
    trace(folder, step=None)
    said = capsys.readouterr().out
    assert "exchanges beside which the other microbatch computes" in said
    assert "mlp backward (" in said
    assert (folder / "exchanges.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "thread_name"} == {
        *("computing", "communication", "data and files", "experts' exchange"),
    }
    lanes = {row["name"].split()[0]: row["tid"] for row in rows if row.get("cat") == "node"}
    assert {name for name, lane in lanes.items() if lane == 3} == {"moe_dispatch", "moe_combine"}
    assert lanes["mlp"] == 0


def assert_an_order_without_overlap_is_found(traced, expected) -> None:
    results, folder = traced(2, function=in_turn)
    assert results == expected  # the same numbers: only the order differs
    for one in read_folder(folder):
        steady = [each for each in of_rank(one) if each.section == "steady"]
        assert steady
        assert not any(each.covered for each in steady)
