"""What comes of the messages that ranks list, without ranks."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loongplug.hetero.routes import Rows
from loongplug.hetero.wire import Ends

Row = Any  # what tells it from others


def delivered(
    ends: Mapping[int, Ends], rows: Callable[[int, int], Sequence[Row]]
) -> dict[tuple[int, int], list[Row]]:
    """By rank and piece, what it takes where each rank gives its ``rows`` of a piece.

    Messages of two ranks come in the order in which they are given. Both ends list the same, and
    every row of what is taken comes once.
    """
    queues: defaultdict[tuple[int, int], deque[list[Row]]] = defaultdict(deque)
    for rank, own in ends.items():
        for piece, end in own.given.items():
            for message in end.messages:
                whole = rows(rank, piece)
                assert len(whole) == end.rows
                sent = [whole[place] for place in places_of(message.rows)]
                queues[rank, message.peer] += [sent] if sent else []
    found = {}
    for rank, own in ends.items():
        for piece, end in own.taken.items():
            came: list[tuple[int, Row]] = []
            for message in end.messages:
                if places := places_of(message.rows):
                    sent = queues[message.peer, rank].popleft()
                    came += zip(places, sent, strict=True)
            if came:
                assert sorted(place for place, _ in came) == [*range(end.rows)]
                found[rank, piece] = [row for _, row in sorted(came)]
    assert not any(queues.values()), queues
    return found


def places_of(rows: Rows) -> list[int]:
    return [place for each in rows for place in range(each.start, each.stop)]
