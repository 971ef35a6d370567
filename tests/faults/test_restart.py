"""torchrun starts a run again that has lost a rank, and it goes on from its last checkpoint.

Fuzzed runs are restarted too, by forked ranks in many layouts; this is torchrun itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_data import base_flags, write_rows
from ranks import run_ranks

from loongplug.training.run import run

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("restarted.py")
MODE = (
    *("--pipeline-model-parallel-size", "2", "--enable-full-hetero-dp"),
    *("--use-distributed-optimizer", "model.image_encoder.freeze=True"),
)


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [report.loss for report in run(flags)]


@pytest.mark.timeout(600)
def test_a_killed_rank_and_a_restart_make_no_difference(tmp_path):
    data = write_rows(tmp_path, rows="mixed", damage="")
    flags = [*base_flags(tmp_path), "--train-data-path", str(data), *MODE]
    expected = run_ranks(losses, 2, flags=flags, timeout=120.0)[0]
    environment = {
        **os.environ,
        "FUZZ_KILL": "0 4",  # the first rank, in the fourth step
        "FUZZ_LOSSES": str(tmp_path / "losses"),
    }
    save = str(tmp_path / "checkpoints")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "--max-restarts", "1", str(DRIVER)),
            *(*flags, "--save", save, "--load", save),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    lines = (tmp_path / "losses").read_text().splitlines()
    found = [tuple(json.loads(line)) for line in lines]
    # Killed in the fourth step, after the checkpoint of the second.
    first = [(0, step + 1, loss) for step, loss in enumerate(expected[:3])]
    second = [(1, step + 1, loss) for step, loss in enumerate(expected) if step >= 2]
    assert found == [*first, *second]
