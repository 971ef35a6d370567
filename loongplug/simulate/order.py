"""The order in which a step's programs can be done, or who waits for whom for ever. Pure.

Which rank goes on first changes nothing: each goes on until it waits for another one, and what is
left when all of them wait is a circle. So the order is found once, whatever things take.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from loongplug.simulate.programs import Meet, Post, Programs, Time, Wait, Work

BEGIN = 0  # the node that all others are behind
_Nodes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """All that takes time in a step, each node behind those that it waits for.

    A node is a work, a message or a meeting. It begins at the latest end of those ``before``, and
    ``takes`` so long. ``works`` has, by node, a work's rank and number among the rank's acts.
    ``last`` are the nodes that each rank ends behind; ``came`` has that of each message.
    """

    before: Sequence[_Nodes]
    takes: Sequence[Time]
    works: Mapping[int, tuple[int, int]]
    last: Sequence[_Nodes]
    came: Sequence[int | None]


class Stuck(NamedTuple):
    """A rank that never goes on, ``what`` it waits for, and the rank that has to do that."""

    rank: int
    what: str
    other: int | None


class Deadlock(Exception):  # noqa: N818 - what it is, not that it is an error
    """Ranks that wait for one another, or for what nobody does; says so in one sentence.

    Each of the ``ring`` waits for the next one, and the last one for the first.
    """

    def __init__(self, waiting: Mapping[int, Stuck]) -> None:
        """``waiting`` are all ranks that are not through."""
        way: list[Stuck] = []
        at = waiting.get(min(waiting))
        while at is not None and at not in way:
            way.append(at)
            at = None if at.other is None else waiting.get(at.other)
        self.ring = tuple(way[-1:] if at is None else way[way.index(at) :])
        parts = [
            f"rank {rank} waits for {'somebody' if other is None else f'rank {other}'} {what}"
            for rank, what, other in self.ring
        ]
        super().__init__("; ".join(parts) + ", for ever")


def order(programs: Programs) -> Order:
    """The order in which all of a step can be done.

    Raises:
        Deadlock: ranks wait for one another, or for what nobody does.
    """
    return _Walk(programs).order()


class _Walk:
    """How far each rank has come.

    What a rank does next is ``behind`` these nodes; so are the ends of messages that it posts.
    """

    def __init__(self, programs: Programs) -> None:
        ranks, messages = programs.ranks, programs.messages
        self._programs, self._messages = programs, messages
        self.before: list[_Nodes] = [()]
        self.takes: list[Time] = [0]
        self.works: dict[int, tuple[int, int]] = {}
        self.behind: list[_Nodes] = [(BEGIN,) for _ in ranks]
        self.came: list[int | None] = [None for _ in messages]
        self._sent: list[_Nodes | None] = [None for _ in messages]
        self._received: list[_Nodes | None] = [None for _ in messages]
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for number, message in enumerate(messages):
            for other in message.behind:
                self._followers[other].append(number)
        self._at = [0 for _ in ranks]
        self._awake = deque(range(len(ranks)))
        self._asleep: defaultdict[int, list[int]] = defaultdict(list)  # ranks by message
        self._here: list[dict[int, Time]] = [{} for _ in programs.groups]  # with what each takes

    def order(self) -> Order:
        """Each rank goes to its end."""
        while self._awake:
            self._goes(self._awake.popleft())
        ranks = self._programs.ranks
        left = [rank for rank, at in enumerate(self._at) if at < len(ranks[rank])]
        if left:
            raise Deadlock({rank: self._waiting(rank) for rank in left})
        return Order(
            before=self.before, takes=self.takes, works=self.works, last=self.behind, came=self.came
        )

    def _goes(self, rank: int) -> None:
        """A rank, as far as it can. Most of a run's time is here."""
        acts, at, behind = self._programs.ranks[rank], self._at[rank], self.behind[rank]
        came, before, takes, asleep = self.came, self.before, self.takes, self._asleep
        messages = self._messages
        while at < len(acts):
            act = acts[at]
            if isinstance(act, Work):
                self.works[len(takes)] = rank, at
                before.append(behind)
                behind = (len(takes),)
                takes.append(act.takes)
            elif isinstance(act, Post):
                for message, sends in act.ends:
                    self._set_out(message, behind, sends=sends)
            elif isinstance(act, Wait):
                for message, sends in act.ends:
                    if sends and messages[message].eager:
                        continue
                    node = came[message]
                    if node is None:
                        asleep[message].append(rank)
                        self._at[rank], self.behind[rank] = at, behind
                        return
                    if node not in behind:
                        behind = (*behind, node)
            else:
                self.behind[rank] = behind
                if not self._meets(rank, act):
                    break
                behind = self.behind[rank]
            at += 1
        self._at[rank], self.behind[rank] = at, behind

    def _node(self, before: _Nodes, takes: Time) -> int:
        self.before.append(before)
        self.takes.append(takes)
        return len(self.takes) - 1

    def _set_out(self, message: int, behind: _Nodes, *, sends: bool) -> None:
        """One end of a message, which comes, if it can; then those that are behind it."""
        messages, came = self._messages, self.came
        ends = self._sent if sends else self._received
        assert ends[message] is None, f"{messages[message]} goes twice"
        ends[message] = behind
        todo = [message]
        while todo:
            message = todo.pop()
            before = self._ends(message)
            if came[message] is not None or before is None:
                continue
            if messages[message].behind:
                others = [came[each] for each in messages[message].behind]
                known = [node for node in others if node is not None]
                if len(known) < len(others):
                    continue
                before = (*dict.fromkeys((*before, *known)),)
            takes = messages[message].takes
            alike = len(before) == 1 and not takes
            came[message] = before[0] if alike else self._node(before, takes)
            self._awake.extend(self._asleep.pop(message, ()))
            todo.extend(self._followers.get(message, ()))

    def _ends(self, message: int) -> _Nodes | None:
        """What a message is behind by its ends; None where one is missing."""
        sent, received = self._sent[message], self._received[message]
        if sent is None or self._messages[message].eager:
            return sent
        return None if received is None else (*dict.fromkeys((*sent, *received)),)

    def _meets(self, rank: int, act: Meet) -> bool:
        """Whether all of the group have come; who came before this rank goes on, too."""
        group, here = self._programs.groups[act.group], self._here[act.group]
        here[rank] = act.takes
        if len(here) < len(group):
            return False
        before = dict.fromkeys(chain.from_iterable(self.behind[each] for each in group))
        meeting = self._node((*before,), max(here.values()))
        here.clear()
        for each in group:
            self.behind[each] = (meeting,)
            if each != rank:
                self._at[each] += 1
                self._awake.append(each)
        return True

    def _waiting(self, rank: int) -> Stuck:
        """What a rank waits for that does not go on."""
        act = self._programs.ranks[rank][self._at[rank]]
        if isinstance(act, Meet):
            group = self._programs.groups[act.group]
            late = next(each for each in group if each not in self._here[act.group])
            return Stuck(rank, f"to meet ranks {', '.join(map(str, group))}", late)
        assert isinstance(act, Wait)
        came, messages = self.came, self._messages
        message, as_sender = next(
            (each, sends)
            for each, sends in act.ends
            if came[each] is None and not (sends and messages[each].eager)
        )
        seen = set[int]()
        while self._ends(message) is not None and message not in seen:  # behind another one
            seen.add(message)
            message = next(each for each in messages[message].behind if came[each] is None)
        sends = self._sent[message] is None if message not in seen else not as_sender
        others = (
            each
            for each, acts in enumerate(self._programs.ranks)
            if any(isinstance(x, Post) and (message, sends) in x.ends for x in acts)
        )
        way = "to send" if sends else "to receive"
        return Stuck(rank, f"{way} {messages[message]}", next(others, None))
