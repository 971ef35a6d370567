import random, sys, time

sys.path[:0] = ["/tmp/wt/fuzz/tests", "/tmp/wt/fuzz/tests/faults"]
import conftest
from pathlib import Path
import tempfile
import loongplug.training.run
from draws import drawn, Draw
from fuzzed_run import World, Wrong
import io, contextlib, os

seed = int(sys.argv[1])
n = int(sys.argv[2])
with tempfile.TemporaryDirectory() as f:
    w = World(Path(f))
    w.weights()
    if n < 0:
        print(w.check(Draw.from_json(sys.argv[3])).ways)
        sys.exit()
    for i in range(n):
        d = drawn(random.Random(f"{seed} {i}").choice)
        t = time.time()
        c = os.times()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                e = w.check(d)
            res = (e.ways, e.fired)
        except Wrong as x:
            res = "WRONG " + str(x)[:700] + "\n....\n" + str(x)[-700:]
        c2 = os.times()
        print(
            i,
            d.layout.ranks,
            d.mode,
            d.fault.kind,
            d.fault.place or d.fault.way,
            d.fault.step,
            round(time.time() - t, 1),
            "cpu",
            round(c2.children_user + c2.children_system - c.children_user - c.children_system, 2),
            res,
            flush=True,
        )
