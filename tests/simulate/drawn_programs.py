"""Programs that are drawn, and what a slow walk makes of them."""

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import strategies as st

from loongplug.simulate.programs import Act, Build, Meet, Post, Programs, Time, Wait, Work


@st.composite
def programs(draw: st.DrawFn) -> Programs:
    """Of two to four ranks, drawn in an order in which they can be done."""
    build = Build()
    count = draw(st.integers(2, 4))
    acts: list[list[Act]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(1, 14))):
        rank, other = draw(st.permutations(range(count)))[:2]
        takes = draw(st.integers(0, 9))
        match draw(st.sampled_from(["work", "eager", "waits", "together", "meet"])):
            case "work":
                acts[rank].append(Work(takes))
            case "meet":
                group = build.group(sorted((rank, other)))
                for each in (rank, other):
                    acts[each].append(Meet(group, takes))
            case kind:
                message = build.message((rank, other), number, eager=kind == "eager", takes=takes)
                acts[rank].append(Post(((message, True),)))
                if kind == "waits":
                    acts[other].append(Post(((message, False),)))
                    acts[rank].append(Wait(((message, True),)))
                else:
                    acts[rank].append(Work(takes))
                    acts[other].append(Post(((message, False),)))
                acts[other].append(Wait(((message, False),)))
    return build.programs(acts)


@dataclass
class Slow:
    """Ranks that go on one act at a time, by whoever comes first in ``turns``."""

    programs: Programs
    turns: list[int]
    at: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    now: dict[int, Time] = field(default_factory=lambda: defaultdict(int))
    posted: dict[tuple[int, bool], Time] = field(default_factory=dict)
    here: dict[tuple[int, int], dict[int, tuple[Time, Time]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def step(self) -> Time | None:
        """When all are through; None where some never are."""
        moved = True
        while moved:
            moved = any([*map(self._goes, self.turns)])
        done = all(self.at[rank] == len(acts) for rank, acts in enumerate(self.programs.ranks))
        return max(self.now[rank] for rank in self.turns) if done else None

    def _goes(self, rank: int) -> bool:
        acts = self.programs.ranks[rank]
        if self.at[rank] == len(acts):
            return False
        match acts[self.at[rank]]:
            case Work(takes=takes):
                self.now[rank] += takes
            case Post(ends=ends):
                self.posted |= dict.fromkeys(ends, self.now[rank])
            case Wait(ends=ends):
                messages = self.programs.messages
                waits = (each for each, sends in ends if not (sends and messages[each].eager))
                came = [self._came(each) for each in waits]
                if None in came:
                    return False
                self.now[rank] = max([self.now[rank], *(each or 0 for each in came)])
            case Meet(group=group, takes=takes) as act:
                number = sum(
                    isinstance(each, Meet) and each.group == group for each in acts[: self.at[rank]]
                )
                here = self.here[group, number]
                here[rank] = self.now[rank], act.takes
                if len(here) < len(self.programs.groups[group]):
                    return False
                self.now[rank] = max(at for at, _ in here.values()) + max(
                    t for _, t in here.values()
                )
        self.at[rank] += 1
        return True

    def _came(self, message: int) -> Time | None:
        sent = self.programs.messages[message]
        ends = [(message, True)] if sent.eager else [(message, True), (message, False)]
        if not all(each in self.posted for each in ends):
            return None
        return max(self.posted[each] for each in ends) + sent.takes
