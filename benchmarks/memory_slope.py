"""How fast the resident memory of ranks grows in a long run without saves, on the CPU.

``python benchmarks/memory_slope.py uniform`` (or ``full-separation``, or ``apart``) trains a tiny
model and prints, for each rank, MiB a step over the second half of the run, by least squares.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WAYS = {
    "uniform": (2, ()),
    "full-separation": (2, ("--enable-full-hetero-dp",)),
    "apart": (3, ("model.image_encoder.rank_offset=2",)),
}
FLAGS = (
    *("--device", "cpu", "--model-name", "qwen3_vl_tiny", "--training-phase", "sft"),
    *("--seq-length", "128", "--micro-batch-size", "1", "--global-batch-size", "2"),
    *("--pipeline-model-parallel-size", "2", "--lr", "1e-3", "--log-interval", "10"),
)
ITERATION = re.compile(r"iteration +(\d+)/")


def main(way: str, steps: int = 3000) -> None:
    """Train ``steps`` steps and print a line for each rank, and its memory at ten places."""
    ranks, flags = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="loongplug-slope-") as folder:
        demo = ["scripts/make_demo_data.py", "--out", folder, "--train", "40", "--test", "8"]
        subprocess.run([sys.executable, *demo], check=True, stdout=subprocess.DEVNULL)
        data = ["--tokenizer-model", f"{folder}/processor"]
        data += ["--train-data-path", f"{folder}/train.jsonl"]
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "loongplug.train"),
                *(*FLAGS, *data, *flags, f"--train-iters={steps}"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        found: dict[int, list[tuple[int, float]]] = {}
        for line in run.stdout or ():
            if (iteration := ITERATION.search(line)) is not None:
                for rank, mib in resident(run.pid).items():
                    found.setdefault(rank, []).append((int(iteration[1]), mib))
                now = " ".join(f"{samples[-1][1]:.2f}" for samples in found.values())
                print(f"step {iteration[1]}: {now} MiB", file=sys.stderr)
    if run.wait() or not found:
        sys.exit(f"the run ended with {run.returncode}")
    for rank, samples in sorted(found.items()):
        steps_of_half, mib_of_half = np.array(samples[len(samples) // 2 :], dtype=float).T
        shown = " ".join(f"{mib:.1f}" for _, mib in samples[:: max(1, len(samples) // 10)])
        slope = np.polyfit(steps_of_half, mib_of_half, 1)[0]
        print(f"{way}, rank {rank}: {slope:.5f} MiB a step ({shown})")


def resident(launcher: int) -> dict[int, float]:
    """MiB of each rank that ``launcher`` has started, pages of files not counted."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for process in (Path("/proc", child) for child in children):
        rank = re.search(rb"\0RANK=(\d+)\0", (process / "environ").read_bytes())
        size = re.search(r"RssAnon:\s+(\d+) kB", (process / "status").read_text())
        if rank and size:
            found[int(rank[1])] = int(size[1]) / 1024
    return found


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
