"""Ways of sending: windows, handshakes, and messages on streams of a device."""

from collections.abc import Hashable

import pytest

from loongplug.simulate.clock import run, step_time
from loongplug.simulate.order import Deadlock
from loongplug.simulate.programs import Act, Build, Post, Programs, Wait, Work
from loongplug.simulate.wires import on_streams, windowed, with_shapes

pytestmark = pytest.mark.quick


def sends(count: int, *, late: int) -> Programs:
    """Rank 0 works 1 and sends, so many times; rank 1 takes all behind a work of so long."""
    build = Build()
    messages = [build.message("rows", number, eager=False) for number in range(count)]
    first: list[Act] = []
    second: list[Act] = [Work(late)]
    for each in messages:
        first += [Work(1), Post(((each, True),))]
        second += [Post(((each, False),)), Wait(((each, False),)), Work(1)]
    return build.programs([first, second])


def anything(_: Hashable) -> bool:
    return True


def test_a_window_holds_up_who_sends_more() -> None:
    free = run(sends(4, late=10))
    assert free.ends == (4, 14)
    # Behind the third it waits for the first, which is taken at 10; behind the fourth till 11.
    assert run(windowed(sends(4, late=10), most=2, of=anything)).ends == (11, 14)
    nothing = windowed(sends(4, late=10), most=2, of=lambda stream: stream == "other")
    assert run(nothing).ends == free.ends


def test_a_handshake_makes_both_ends_wait() -> None:
    found = run(with_shapes(sends(2, late=10), of=anything))
    assert run(sends(2, late=10)).ends == (2, 12)
    assert found.ends == (11, 12)
    assert len(found.came) == 4


def crossed(*, one: str, two: str) -> Programs:
    """Rank 0 sends to rank 1 and takes from it; rank 1 the other way around."""
    build = Build()
    there, back = build.message(one, 0, eager=False), build.message(two, 0, eager=False)
    ranks: list[list[Act]] = [
        [Post(((there, True),)), Post(((back, False),)), Wait(((back, False),))],
        [Post(((back, True),)), Post(((there, False),)), Wait(((there, False),))],
    ]
    return build.programs(ranks)


def test_two_ways_on_one_stream_hang() -> None:
    assert step_time(crossed(one="there", two="back")) == 0
    apart = on_streams(crossed(one="there", two="back"), communicator=lambda stream: stream)
    assert step_time(apart) == 0
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1"):
        run(on_streams(crossed(one="there", two="back"), communicator=lambda _: "both"))


def test_a_pool_of_streams_hands_out_one_twice() -> None:
    """The third communicator has the first one's stream, out of two."""
    build = Build()
    slow, other, third = (
        build.message(name, 0, eager=False) for name in ("slow", "other", "third")
    )
    ranks: list[list[Act]] = [
        [Post(((each, True),)) for each in (slow, other, third)],
        [Post(((other, False), (third, False))), Wait(((third, False),)), Work(1)],
        [Work(7), Post(((slow, False),))],
    ]
    programs = build.programs(ranks)
    assert run(on_streams(programs, communicator=lambda stream: stream)).ends[1] == 1
    pooled = on_streams(programs, communicator=lambda stream: stream, pool=2)
    assert run(pooled).ends[1] == 8


def test_one_queue_holds_up_what_is_behind() -> None:
    """A receive that cannot begin yet holds up a send on another stream."""
    build = Build()
    first, second = (build.message("slow", number, eager=False) for number in range(2))
    answer = build.message("answer", 0, eager=False)
    ranks: list[list[Act]] = [
        [Post(((first, False),)), Post(((second, False),)), Post(((answer, True),))],
        [Post(((answer, False),)), Wait(((answer, False),)), Post(((first, True), (second, True)))],
    ]
    programs = build.programs(ranks)

    def own(stream: Hashable) -> Hashable:
        return stream

    assert step_time(on_streams(programs, communicator=own)) == 0
    with pytest.raises(Deadlock, match="rank 1 waits for rank 0 to send answer 0"):
        run(on_streams(programs, communicator=own, one_queue=True))
