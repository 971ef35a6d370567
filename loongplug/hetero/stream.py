"""What one rank does in a step that streams, and what of it leaves for the host meanwhile. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loongplug.hetero.operations import Kept, Move, To


class PieceWork(NamedTuple):
    """Pieces that go through the encoder together, before a pass of this rank's stage."""

    before: int
    forward: bool
    pieces: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Pieces that are encoded between the decoder's passes.

    ``work`` is what this rank does with those that it has, in its order. ``pieces`` are the numbers
    of each microbatch's, of all of the step.
    """

    work: tuple[PieceWork, ...]
    pieces: tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How activations leave and come back: first of all ``before`` a pass, and ``within`` a work.

    The latter is by the work's place: behind the forward of pieces, or ahead of their backward,
    when their gradients are there. ``leaving`` are the pieces of each pass that leaves.
    """

    leaving: frozenset[tuple[int, ...]]
    before: Mapping[int, Sequence[Move]]
    within: Mapping[int, Sequence[Move]]


def activations_away(work: Sequence[PieceWork]) -> Moves:
    """Of passes whose backward is so much later that there is a pass to leave and come beside.

    A copy has the decoder's next pass to be done, or the encoder's own where that comes first. What
    is needed comes beside the pass before, or beside the encoder's backward before that.
    """
    begin = {each.pieces: each.before for each in work if each.forward}
    end = {each.pieces: each.before for each in work if not each.forward}
    moved = [
        (place, each)
        for place, each in enumerate(work)
        if end[each.pieces] - begin[each.pieces] > 2
    ]
    before: defaultdict[int, list[Move]] = defaultdict(list)
    within: defaultdict[int, list[Move]] = defaultdict(list)
    forwards = [each for each in moved if each[1].forward]
    for (place, one), behind in zip(forwards, [*forwards[1:], None], strict=False):
        within[place].append(Move(to=To.LEAVE, what=Kept.ACTIVATIONS, pieces=one.pieces[:1]))
        gone = Move(to=To.FREE, what=Kept.ACTIVATIONS, pieces=one.pieces[:1])
        if behind is not None and behind[1].before == one.before:
            within[behind[0]].append(gone)
        else:
            before[one.before + 1].append(gone)
    backwards = [each for each in moved if not each[1].forward]
    for (place, one), ahead in zip(backwards, [None, *backwards[:-1]], strict=False):
        comes = Move(to=To.RETURN, what=Kept.ACTIVATIONS, pieces=one.pieces[:1])
        within[place].append(Move(to=To.HERE, what=Kept.ACTIVATIONS, pieces=one.pieces[:1]))
        if ahead is not None and ahead[1].before == one.before:
            within[ahead[0]].append(comes)
        else:
            before[one.before - 1].append(comes)
    leaving = frozenset(one.pieces for _, one in forwards)
    return Moves(leaving=leaving, before=before, within=within)
