"""Time the levels of two checkouts step by step in turn: ``python levels_of_commits.py OLD NEW``.

Every round has new processes, since where memory lies is one process's luck. Weights and samples
are those of ``bench.py levels`` in this checkout, for both sides.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median

from in_turn import Side, Step, in_turn

# A side: one level's ranks, which do a step for each line that they are sent.
_SIDE = """
import json, os, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path

from modes.levels_work import SETTINGS, Work, level_variants, write_levels_data
from loongplug.verify.ranks import join, run_ranks
from loongplug.verify.forked_runs import preload

folder, name, level, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
model = ("--model-name", sys.argv[5])
data, weights = folder.parent / "data", folder.parent / "weights"
work = replace(Work(), steps=steps)
settings = {each.name: each for each in SETTINGS}


def train(rank, tell, flags, done=None):
    import torch.distributed as dist
    join(rank, folder=folder, device="cpu", minutes=5.0)
    from loongplug.training.run import run

    def after_step(report):
        if rank == 0 and done is not None:
            os.write(done, json.dumps([report.loss]).encode() + b"\\n")
            sys.stdin.readline()
        dist.barrier()  # nobody works ahead in the other side's time

    reports = run(flags, on_report=after_step)
    dist.barrier()
    return len(reports)


preload("cpu")
if level == "weights":
    write_levels_data(data, samples=work.samples)
    flags = (*model, "--lr", "0", "--min-lr", "0", "--train-iters", "1", "--save-hf", str(weights))
    run_ranks(partial(train, flags=[*work.flags(data), *flags]), 1, folder=folder,
              on_event=lambda line: None, timeout=600)
elif level == "names":
    print(json.dumps([(each.name, level) for each in SETTINGS for level in each.levels]))
else:
    setting = settings[name]
    variants = level_variants(level, work, setting)
    flags = [*work.flags(data), *model, *setting.flags, "--load-hf", str(weights)]
    flags += variants[len(variants) // 2]  # of several splits of layers the middle one
    run_ranks(partial(train, flags=flags, done=int(sys.argv[6])), setting.ranks,
              folder=folder, on_event=lambda line: None, timeout=600)
"""
_WARMUP = 2


def _started(checkout: Path, *words: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", _SIDE, *map(str, words)],
        cwd=checkout,
        env=_environment(checkout),
        text=True,
        **options,
    )


def _environment(checkout: Path) -> dict[str, str]:
    paths = os.pathsep.join((str(checkout), str(Path(__file__).parent)))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def _print_level(title: str, rounds: Sequence[Sequence[tuple[Step, Step]]]) -> None:
    """Each round's median counts once: its processes have their memory where it lies."""
    old, new = zip(*chain(*rounds), strict=True)
    ratios = sorted(median(b.seconds / a.seconds for a, b in pairs) for pairs in rounds)
    worked = sum(each.processor for each in new) / sum(each.processor for each in old)
    print(
        f"{title}: old {median(each.seconds for each in old):.3f} s, new "
        f"{median(each.seconds for each in new):.3f} s a step; new over old {median(ratios):.3f},"
        f" by round {', '.join(f'{each:.3f}' for each in ratios)}; processor time {worked:.3f}",
        flush=True,
    )


def main() -> None:
    """Print, for each level, the step time of both sides and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="qwen3_vl_tiny", help="a model for the same data")
    parser.add_argument("--only", default="", help="levels whose names begin so: 'TP2, uniform'")
    options = parser.parse_args()
    old, new = options.old.resolve(), options.new.resolve()
    found: dict[str, list[list[tuple[Step, Step]]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="loongplug-commits-") as name:
        root = Path(name)
        (root / "names").mkdir()
        names, _ = _started(
            old, root / "names", "", "names", options.steps, options.model, stdout=subprocess.PIPE
        ).communicate()
        _started(old, root / "names", "", "weights", options.steps, options.model).wait()
        for number in range(options.rounds):
            for setting, level in json.loads(names.splitlines()[-1]):
                shown = f"{setting}, {level}"
                if not shown.startswith(options.only):
                    continue
                folder = root / f"{number} {shown}"
                folder.mkdir()
                for each in ("data", "weights"):
                    (folder / each).symlink_to(root / each)
                for side in ("old", "new"):
                    (folder / side).mkdir()
                runs = [
                    Side(
                        ("-c", _SIDE, folder / side, setting, level, options.steps, options.model),
                        environment=_environment(checkout),
                        folder=checkout,
                    )
                    for side, checkout in (("old", old), ("new", new))
                ]
                # The first one's processes lie elsewhere in the machine's memory and order.
                turned = number % 2 == 1
                first, second = reversed(runs) if turned else runs
                pairs = in_turn((first, second), warmup=_WARMUP, steps=options.steps)
                found[shown].append([(b, a) if turned else (a, b) for a, b in pairs])
                _print_level(f"round {number + 1}: {shown}", found[shown])


if __name__ == "__main__":
    main()
