"""Programs of ranks: the acts of a step in order, and what ranks send one another. Pure.

Times are of one unit. Only sums and maxima are made of them, so that integers stay integers.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

Time = int | float
End = tuple[int, bool]  # of a message, by its number, and whether it is the one that sends


class Label(NamedTuple):
    """What a work is called in a trace: a phase of the recorder's, and of what it is."""

    phase: str
    microbatch: int | None = None
    chunk: int | None = None


class Work(NamedTuple):
    """The rank computes. It ``holds`` so many bytes more from its begin on, or fewer behind it."""

    takes: Time
    label: Label = Label("work")
    holds: int = 0


class Post(NamedTuple):
    """These ends of messages set out together; nobody waits."""

    ends: tuple[End, ...]


class Wait(NamedTuple):
    """The rank goes on when these messages have come, or may be forgotten by who sends them."""

    ends: tuple[End, ...]


class Meet(NamedTuple):
    """All ranks of a group go on together, when the last one has come, and so much later.

    The n-th that a rank has of a group is the n-th of each other one.
    """

    group: int
    takes: Time = 0


Act = Work | Post | Wait | Meet


class RankMessage(NamedTuple):
    """What is sent: ``which`` one of its stream.

    It sets out when both of its ends are posted, or, where it is ``eager``, when its send is, and
    each message that it is ``behind`` has come; then it ``takes`` so long. Who sends an eager one
    waits for nothing.
    """

    stream: Hashable
    which: Hashable
    eager: bool = True
    takes: Time = 0
    behind: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The message as a user reads it."""
        return f"{_said(self.stream)} {_said(self.which)}"


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What each rank does, in order.

    ``groups`` are the ranks that :class:`Meet` has together. ``places`` say where a rank stands, by
    kind, as traces have it: ``{"pp": 0}``.
    """

    ranks: tuple[tuple[Act, ...], ...]
    messages: tuple[RankMessage, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    places: tuple[Mapping[str, int], ...] = ()

    def held(self) -> tuple[int, ...]:
        """The most bytes that each rank holds at one time."""
        holds = ((act.holds for act in acts if isinstance(act, Work)) for acts in self.ranks)
        return tuple(max(accumulate(each, initial=0)) for each in holds)


class Build:
    """Programs in the making: messages by their names, groups by their ranks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, Hashable], int] = {}
        self._messages: list[RankMessage] = []
        self._groups: dict[tuple[int, ...], int] = {}

    def message(
        self, stream: Hashable, which: Hashable, *, eager: bool = True, takes: Time = 0
    ) -> int:
        """The number of a message; it is what it was when it was asked for first."""
        found = self._numbers.setdefault((stream, which), len(self._messages))
        if found == len(self._messages):
            self._messages.append(RankMessage(stream, which, eager, takes))
        return found

    def group(self, ranks: Sequence[int]) -> int:
        """The number of the group of these ranks."""
        return self._groups.setdefault(tuple(ranks), len(self._groups))

    def programs(
        self, ranks: Sequence[Sequence[Act]], *, places: Sequence[Mapping[str, int]] = ()
    ) -> Programs:
        """The programs with these acts, by rank."""
        return Programs(
            ranks=tuple(map(tuple, ranks)),
            messages=tuple(self._messages),
            groups=tuple(self._groups),
            places=tuple(places),
        )


def _said(what: Hashable) -> str:
    return " ".join(map(_said, what)) if isinstance(what, tuple) else str(what)
