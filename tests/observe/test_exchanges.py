"""What computes beside an exchange, of orders written by hand, on two streams."""

import pytest

from loongplug.observe.exchanges import Node, TracedExchange, combined_steps, exchanges, slots
from loongplug.observe.trace_file import TraceEvent

pytestmark = pytest.mark.quick

NAMES = {"A": "pre_dispatch_computation", "D": "moe_dispatch", "M": "mlp", "C": "moe_combine"}
NAMES |= {"I": "pre_process", "O": "post_process"}
DIRECTIONS = {"f": "forward", "b": "backward", "w": "wgrad"}
FORWARD, BACKWARD = "Af Df Mf Cf", "Cb Mb Db Ab"
# A layer's forward with a layer's backward, as Megatron's combined schedule enqueues them.
OVERLAPPED = "Cb Af Mb Df Db Mf Cf Ab"
DELAYED = "Cb Af Mb Df Mw Db Mf Cf Ab Aw"
EARLY = "Cb Af Mb Df Db Ab Mf Cf"


def events(order: str) -> list[TraceEvent]:
    """``Df`` is a dispatch's forward, ``|`` the end of a combined step; times say nothing."""
    found = []
    for word in order.split():
        if word == "|":
            details, phase, name = {}, "forward_backward", "forward with backward"
        else:
            name, phase = NAMES[word[0]], "node"
            details = {
                "direction": DIRECTIONS[word[1]],
                "stream": "communication" if word[0] in "DC" else "computation",
                "microbatch": 1 if word[1] == "f" else 0,
            }
        found.append(TraceEvent(phase=phase, name=name, start=0, end=0, step=1, details=details))
    return found


def word(node: Node) -> str:
    letters = {name: letter for letter, name in NAMES.items()}
    return letters[node.name] + node.direction[0]


def found(order: str) -> list[TracedExchange]:
    return [each for step in combined_steps(events(order)) for each in exchanges(step)]


def beside(order: str) -> list[tuple[str, str]]:
    """By exchange what computes beside it."""
    return [
        (word(each.node), " ".join(word(other) for other in each.beside)) for each in found(order)
    ]


def test_each_exchange_has_the_other_pass_beside_it():
    assert beside(f"{OVERLAPPED} |") == [("Cb", "Af"), ("Df", "Mb"), ("Db", "Mf"), ("Cf", "Ab")]
    # Layers behind each other and what is around them: attention waits for the combine before it.
    whole = f"If Ob {OVERLAPPED} {OVERLAPPED} Of Ib |"
    expected = [("Cb", "Af"), ("Df", "Mb"), ("Db", "Mf"), ("Cf", "Ab")]
    assert beside(whole) == [*expected, *expected]
    assert all(each.covered and each.section == "steady" for each in found(whole))


def test_weights_gradients_wait_for_nothing_but_their_stream():
    assert beside(f"If {DELAYED} {DELAYED} Ib |") == [
        *[("Cb", "Af"), ("Df", "Mb Mw"), ("Db", "Mw Mf"), ("Cf", "Ab Aw")],
        # The layer's own are beside the next one's exchange.
        *[("Cb", "Aw Af"), ("Df", "Mb Mw"), ("Db", "Mw Mf"), ("Cf", "Ab Aw Ib")],
    ]


def test_passes_one_after_the_other_have_nothing_beside_their_exchanges():
    for order in (
        f"{FORWARD} {BACKWARD} |",
        f"{BACKWARD} {FORWARD} |",
        f"If Ob {FORWARD} {BACKWARD} {FORWARD} {BACKWARD} Of Ib |",
    ):
        assert all(others == "" for _, others in beside(order)), order
        assert not any(each.covered for each in found(order))


def test_own_weights_gradients_do_not_cover_an_exchange():
    first, second, *_ = found("Cb Mb Mw Db Ab |")
    assert [word(other) for other in second.beside] == ["Mw"]
    assert not first.covered
    assert not second.covered


def test_attention_s_memory_let_go_early_costs_half_the_overlap():
    assert beside(f"{EARLY} {EARLY} |") == [("Cb", "Af"), ("Df", "Mb"), ("Db", ""), ("Cf", "")] * 2


def test_a_passes_begin_waits_for_what_was_given_to_compute_before():
    """The backward's first exchange does not run beside the input of the forward."""
    assert beside("If Cb Af Mb Db Ab |")[0] == ("Cb", "Af")


def test_sections_and_combined_steps_are_apart():
    order = f"If {FORWARD} Of | If Ob {OVERLAPPED} Of Ib | Ob {BACKWARD} Ib |"
    assert [each.section for each in found(order)] == [
        *["warm-up"] * 2,
        *["steady"] * 4,
        *["cool-down"] * 2,
    ]
    # A combined step that was cut off is none.
    assert found(f"{FORWARD} | {BACKWARD}") == found(f"{FORWARD} |")


def test_boxes_of_the_picture_begin_when_what_they_wait_for_is_over():
    (step,) = combined_steps(events(f"If {OVERLAPPED} {OVERLAPPED} |"))
    layer = [0, 0, 1, 1, 2, 2, 3, 3]  # two boxes at a time
    assert slots(step.nodes) == [0, *(slot + 1 for slot in layer), *(slot + 5 for slot in layer)]
