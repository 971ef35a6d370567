import sys, time

sys.path[:0] = ["tests", "tests/hetero"]
from streamed_steps import even
from loongplug.hetero.streaming import *
from loongplug.hetero import streaming as s

step = even(8, percent=50, microbatches=64, count=8)


def t(f, n=3):
    a = []
    for _ in range(n):
        b = time.perf_counter()
        r = f()
        a.append(time.perf_counter() - b)
    return round(1000 * min(a), 1), r


print("all", t(lambda: s.streamed(step))[0])
print("clock", t(lambda: PlanClock(step))[0])
alone = decoder_alone(step)
print("alone", t(lambda: decoder_alone(step))[0])
w = s.waits_of(step, alone)
pa = s.passes_ahead(step, alone)
print(
    "waits",
    t(lambda: s.waits_of(step, alone))[0],
    "ahead",
    t(lambda: s.passes_ahead(step, alone))[0],
)
ms, p = t(lambda: s.blocks(step, w, fill=2))
print("blocks", ms)
ms, d = t(lambda: s.drafted(step, pa, s._HABITS[0]))
print("draft", ms)
ms, j = t(lambda: tuple(s._joined(step, x) for x in d.work))
print("joined", ms)
c = PlanClock(step)
print("time", t(lambda: c.time(d))[0], t(lambda: c.time(p))[0])
