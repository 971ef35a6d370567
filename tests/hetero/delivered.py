"""What comes of the messages that ranks list, and of what they deal, without ranks."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loongplug.hetero.piece_routes import Deal
from loongplug.hetero.row_moves import Rows, size
from loongplug.hetero.wire import StepMoves

Row = Any  # what tells it from others


def delivered(
    moves: Mapping[int, StepMoves], rows: Callable[[int, int], Sequence[Row]]
) -> dict[tuple[int, int], list[Row]]:
    """By rank and piece, what it takes where each rank gives its ``rows`` of a piece.

    Messages of two ranks come in the order in which they are given. Both ends list the same, and
    every row of what is taken comes once; an AssertionError names ranks and pieces.
    """
    queues: defaultdict[tuple[int, int], deque[tuple[int, list[Row]]]] = defaultdict(deque)
    for rank, own in moves.items():
        for piece, several in own.moves.items():
            given = [each for each in several if each.source == rank]
            for move in given:
                whole = rows(rank, piece)
                assert len(whole) == sum(size(each.given) for each in given), (rank, piece)
                sent = [whole[place] for place in places_of(move.given)]
                if sent:
                    queues[rank, move.target].append((piece, sent))
    found = {}
    for rank, own in moves.items():
        for piece, several in own.moves.items():
            came: list[tuple[int, Row]] = []
            for move in several:
                if move.target == rank and (places := places_of(move.placed)):
                    queue = queues[move.source, rank]
                    said = f"rank {rank} takes {len(places)} rows of piece {piece}"
                    assert queue, f"{said}, which rank {move.source} does not send"
                    number, sent = queue.popleft()
                    others = f"rank {move.source} sends {len(sent)} rows of piece {number}"
                    assert len(sent) == len(places), f"{said}, and {others}"
                    came += zip(places, sent, strict=True)
            if came:
                assert sorted(place for place, _ in came) == [*range(len(came))], (rank, piece)
                found[rank, piece] = [row for _, row in sorted(came)]
    for (source, target), left in queues.items():
        pieces = [piece for piece, _ in left]
        assert not left, f"rank {source} sends pieces {pieces} to rank {target}, who takes none"
    return found


def dealt(deal: Deal, held: Mapping[int, Sequence[Row]]) -> dict[int, list[Row]]:
    """What each rank of a group comes to have of a microbatch, of what each ``held``."""
    whole: dict[int, Row] = {}
    for rank, rows in zip(deal.ranks, deal.holds, strict=True):
        for place, row in zip(places_of(rows), held[rank], strict=True):
            assert place not in whole, f"rank {rank} holds row {place}, and another one does"
            whole[place] = row
    assert sorted(whole) == [*range(deal.rows)]
    needed = zip(deal.ranks, deal.needs, strict=True)
    return {rank: [whole[place] for place in places_of(rows)] for rank, rows in needed}


def places_of(rows: Rows) -> list[int]:
    return [place for each in rows for place in range(each.start, each.stop)]
