"""Ranks that share a machine's cores, as on a CPU: what computes at a time goes on alike. Pure."""

from heapq import heappop, heappush

from loongplug.simulate.clock import Run, read
from loongplug.simulate.order import order
from loongplug.simulate.programs import Programs, Time


def run_shared(programs: Programs, *, cores: int) -> Run:
    """A step whose ranks compute on so many ``cores``; a rank uses one while it computes.

    Of more ranks than cores, all that compute have equal parts. Messages and meetings take no core.
    ``busy`` stays what work takes by itself.

    Raises:
        Deadlock: ranks wait for one another, or for what nobody does.
    """
    assert cores > 0, cores
    found = order(programs)
    count = len(found.takes)
    begins: list[Time] = [0] * count
    ends: list[Time] = [0] * count
    behind: list[list[int]] = [[] for _ in range(count)]
    for node, before in enumerate(found.before):
        for each in before:
            behind[each].append(node)
    missing = [len(before) for before in found.before]
    computing: list[tuple[float, int]] = []  # by how much each that computes has done by then
    sent: list[tuple[float, int]] = []  # by when it is there
    now = done = 0.0  # the time, and what a rank would have done that computed all the time
    sent.append((0.0, 0))
    while computing or sent:
        rate = min(1.0, cores / len(computing)) if computing else 1.0
        works = now + (computing[0][0] - done) / rate if computing else float("inf")
        if sent and sent[0][0] <= works:
            then, node = heappop(sent)
        else:
            then, node = works, heappop(computing)[1]
        done += (then - now) * rate
        now = then
        ends[node] = now
        for each in behind[node]:
            missing[each] -= 1
            if not missing[each]:
                begins[each] = now
                if each in found.works:
                    heappush(computing, (done + found.takes[each], each))
                else:
                    heappush(sent, (now + found.takes[each], each))
    return read(found, programs, begins, ends)
