"""The failure board as torchrun's ranks use it: with the store of its agent."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import loongplug

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ROOT = str(Path(loongplug.__file__).parents[1])


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            from loongplug.parallel.failure import failure_board
            with failure_board():
                dist.init_process_group("gloo")
                dist.barrier()
                if dist.get_rank() == 1:
                    raise ValueError("the second rank is unwell")
                dist.recv(torch.ones(1), src=1)
            """
        )
    )
    started = time.monotonic()
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=3", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
    )
    assert done.returncode != 0
    assert time.monotonic() - started < 180
    assert "loongplug: error [rank 1]: the second rank is unwell" in done.stderr
    for rank in (0, 2):
        line = f"loongplug: error [rank {rank}]: rank 1 failed: the second rank is unwell"
        assert line in done.stderr
    assert "exitcode: 1" in done.stderr
