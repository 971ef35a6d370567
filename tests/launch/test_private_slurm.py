"""``slurm.sbatch``, and ranks by ``srun``, on a real Slurm of two nodes on this machine."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from fake_slurm import ROOT
from private_slurm import NODES, Cluster, cluster, missing
from tiny_job import CPU, board_job, on_one_node

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing()), reason="Slurm is not installed (apt-get install slurm-wlm munge)"
    ),
]
LAUNCH = "scripts/launch/slurm.sbatch"
STEPS = 16
MEETS = """
import torch.distributed as dist
from loongplug.parallel.failure import failure_board
from loongplug.parallel.rendezvous import served_store
with failure_board():
    served = served_store(on_gpus=False)
    dist.init_process_group("gloo")
    dist.barrier()
    print("met", dist.get_world_size(), flush=True)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with cluster(folder) as made:
        yield made
    assert not [each for each in made.processes() if each.status() != psutil.STATUS_ZOMBIE]


def test_ranks_meet_by_srun_and_a_job_s_script_is_none(slurm: Cluster, tmp_path: Path) -> None:
    """Its script has a number and the job's size, too, and would wait for ranks that never come."""
    main, script = tmp_path / "main.py", tmp_path / "job.sh"
    main.write_text(MEETS)
    script.write_text(f"#!/bin/bash\n{sys.executable} {main}; srun {sys.executable} {main}\n")
    job = slurm.submits("--ntasks=2", script)
    assert job.ends() == "COMPLETED", job.printed
    assert job.printed.count("SLURM_NTASKS is 2, but a job's script runs once: start ") == 1
    assert job.printed.count("met 2\n") == 2


def test_scancel_ends_all_ranks(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submits(LAUNCH, SCRIPT=board_job(tmp_path))
    job.prints("is there", times=2)
    assert slurm.processes(of_jobs=True)
    slurm.does("scancel", job.number)
    assert job.ends() == "CANCELLED"
    eventually(lambda: not slurm.processes(of_jobs=True))


def test_a_lost_node_s_job_starts_again(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\necho started $NODE_RANK of $NNODES at $MASTER_ADDR\n"
        "if [[ -z ${SLURM_RESTART_COUNT:-} ]]; then sleep 300; fi\n"
    )
    script.chmod(0o755)
    job = slurm.submits(LAUNCH, SCRIPT=os.path.relpath(script, ROOT))
    job.prints("started", times=2)
    slurm.kill(NODES[1])
    slurm.does("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=lost")
    eventually(lambda: job.told("JobState") == "PENDING")
    slurm.start(NODES[1])
    assert job.ends() == "COMPLETED", job.printed
    assert job.told("Restarts") == "1"
    for node in range(2):
        assert job.printed.count(f"started {node} of 2 at {NODES[0]}\n") == 2


def test_a_job_saves_at_its_warning_and_goes_on(
    slurm: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    """Queued again, its loss is that of a job of one node that nothing came between."""
    out, environment = tmp_path / "out", {**environment, "TRAIN_ITERS": str(STEPS)}
    job = slurm.submits(LAUNCH, *CPU, OUTPUT_DIR=str(out), **environment)
    job.prints("iteration 2/")
    slurm.does("scancel", "--batch", "--signal=USR1", job.number)
    assert job.ends() == "COMPLETED", job.printed
    assert job.told("Restarts") == "1"
    steps = [job.printed.count(f"iteration {step}/{STEPS}") for step in range(1, STEPS + 1)]
    assert steps == [1] * STEPS
    one = tmp_path / "one"
    one.mkdir()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["loss_last"] == pytest.approx(on_one_node(one, environment)[-1], rel=1e-6)
