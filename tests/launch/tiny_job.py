"""A tiny run by ``scripts/sft.sh`` on the CPU, and what one node makes of it."""

import os
import subprocess
from pathlib import Path

from fake_slurm import ROOT
from ranks import run_ranks

from loongplug.training.run import run

CPU = ("--device", "cpu", "--lr", "1e-3")
# Notes what it is asked for.
STUB = '#!/bin/sh\nprintf "%s\\n" "$@" > "$FAKE_SLURM/words_${NODE_RANK:-0}"\n'
# Ranks that the failure board watches, without a model.
DIES = """
import torch, torch.distributed as dist
from loongplug.parallel.failure import failure_board
with failure_board():
    dist.init_process_group("gloo")
    dist.barrier()
    print("rank", dist.get_rank(), "is there", flush=True)
    dist.recv(torch.ones(1), src=1 - dist.get_rank())
"""


def stub_python(folder: Path) -> dict[str, str]:
    """A python that notes what it is asked for, first on PATH."""
    python = folder / "stub" / "python"
    python.parent.mkdir()
    python.write_text(STUB)
    python.chmod(0o755)
    return {"PATH": f"{python.parent}:{folder / 'bin'}:{os.environ['PATH']}"}


def words_of(folder: Path, node: int) -> list[str]:
    return (folder / f"words_{node}").read_text().splitlines()


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [report.loss for report in run(flags)]


def on_one_node(folder: Path, environment: dict[str, str]) -> list[float]:
    """The losses of two ranks with what ``sft.sh`` says on one node."""
    out = {"GPUS_PER_NODE": "2", "OUTPUT_DIR": str(folder / "out"), "FAKE_SLURM": str(folder)}
    subprocess.run(
        [ROOT / "scripts" / "sft.sh", *CPU],
        env={**environment, **out, **stub_python(folder)},
        check=True,
        timeout=120,
    )
    words = words_of(folder, 0)
    flags = words[words.index(str(ROOT / "loongplug" / "train.py")) + 1 :]
    return run_ranks(losses, 2, flags=flags, timeout=200.0)[0]


def board_job(folder: Path) -> str:
    """A launch script that starts ``DIES`` on each node, as SCRIPT."""
    main, script = folder / "main.py", folder / "run.sh"
    main.write_text(DIES)
    script.write_text(
        "#!/bin/bash\nexec python -m loongplug.parallel.launch --nnodes 2 --node_rank $NODE_RANK "
        f'--nproc_per_node 1 --master_addr $MASTER_ADDR --master_port $MASTER_PORT "{main}"\n'
    )
    script.chmod(0o755)
    return os.path.relpath(script, ROOT)
