"""``slurm.sbatch`` with stand-ins of Slurm's commands: two nodes are processes of this machine."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from eventually import eventually
from fake_slurm import NODES, ROOT, job, kill, wait_for_line
from tiny_job import CPU, board_job, on_one_node, stub_python, words_of

STEPS = 16
# Seconds, some 20 on quiet cores; a collective of gloo or NCCL would wait for many minutes.
BOUND = 60.0


@pytest.mark.quick
def test_each_node_has_its_number_and_the_first_one_s_address(tmp_path: Path) -> None:
    paths = {"MODEL_DIR": "model", "TRAIN_DATA": "rows.jsonl"}
    given = {"GPUS_PER_NODE": "4", "MASTER_PORT": "", **stub_python(tmp_path)}
    given["SRUN_OPTIONS"] = "--container-image=i.sqsh --container-mounts=/a:/a"
    with job(tmp_path, "--lr", "3e-6", **paths, **given) as running:
        assert running.end() == 0
        assert not running.requeued
    launched = ("-m", "loongplug.parallel.launch", "--nnodes", "2", "--node_rank")
    for node in range(NODES):
        words = words_of(tmp_path, node)
        assert words[: len(launched)] == [*launched]
        assert words[len(launched)] == str(node)
        assert words[len(launched) + 1 :][:6] == [
            *("--nproc_per_node", "4", "--master_addr", "localhost", "--master_port", "24711")
        ]
        assert words[-2:] == ["--lr", "3e-6"]
    options = (tmp_path / "srun").read_text().split()
    assert options[:3] == ["--ntasks-per-node=1", "--cpus-per-task=2", "--kill-on-bad-exit=1"]
    assert options[3:5] == given["SRUN_OPTIONS"].split()


@pytest.mark.quick
def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT="scripts/sft_of_mine.sh") as running:
        said, _ = running.process.communicate(timeout=120)
    assert running.process.returncode == 1
    assert f"{ROOT}/scripts/sft_of_mine.sh is no launch script: submit from the root" in said
    assert not (tmp_path / "srun").exists()


@pytest.mark.quick
def test_a_failed_node_fails_the_job(tmp_path: Path) -> None:
    """Its code is the job's; a job that was warned, and then failed, is not queued again."""
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\ntrap 'ended=1' TERM; echo started\n"
        "while [[ -z $ended ]]; do sleep 0.05; done; exit $((3 * NODE_RANK))\n"
    )
    script.chmod(0o755)
    given = {"SCRIPT": os.path.relpath(script, ROOT)}
    with job(tmp_path, **given) as running:
        for node in range(NODES):
            wait_for_line(running, "started", node=node)
        running.warn()
        assert running.end() == 3
        assert not running.requeued


@pytest.mark.quick
def test_a_warning_is_given_again_where_slurm_is_busy(tmp_path: Path) -> None:
    """Lost, it would leave the job to be killed at its limit, without a checkpoint."""
    script, busy = tmp_path / "run.sh", tmp_path / "busy"
    script.write_text(
        "#!/bin/bash\ntrap 'exit 0' TERM; echo started; while :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    busy.touch()
    with job(tmp_path, SCRIPT=os.path.relpath(script, ROOT)) as running:
        for node in range(NODES):
            wait_for_line(running, "started", node=node)
        running.warn()
        assert running.end() == 0
        assert running.requeued
    assert not busy.exists()


@pytest.mark.quick
def test_a_warning_before_the_run_has_a_number_is_passed_on(tmp_path: Path) -> None:
    """The shell has forked, but does not know the run's number yet."""
    here, ready, go = tmp_path / "here", tmp_path / "ready", tmp_path / "go"
    run, stop = tmp_path / "run.sh", tmp_path / "stop.sh"
    run.write_text(f"#!/bin/bash\ntrap 'exit 7' TERM; : > {ready}; while :; do sleep 0.05; done\n")
    run.chmod(0o755)
    waits = f": > {here}; until [[ -e {go} ]]; do sleep 0.05; done"
    stop.write_text(f"trap 'if [[ $BASH_COMMAND == run=* ]]; then {waits}; fi' DEBUG\n")
    node = ROOT / "scripts" / "launch" / "slurm_node.sh"
    environment = {**os.environ, "SLURM_NODEID": "0", "BASH_ENV": str(stop)}
    process = subprocess.Popen(["bash", node, run], env=environment, start_new_session=True)
    try:
        eventually(lambda: here.exists() and ready.exists())
        process.terminate()
        go.touch()
        assert process.wait(timeout=20) == 7
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_two_nodes_save_in_time_and_train_as_one_does(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Warned, the job saves and is queued again; then it goes on, and its loss is one node's."""
    out = tmp_path / "out"
    environment = {**environment, "TRAIN_ITERS": str(STEPS)}
    given = {**environment, "OUTPUT_DIR": str(out)}
    with job(tmp_path, *CPU, **given) as running:
        wait_for_line(running, "iteration 2/", node=0)
        running.warn()
        assert running.end() == 0
        assert running.requeued
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= saved < STEPS
    with job(tmp_path, *CPU, **given) as running:
        assert running.end() == 0
        assert not running.requeued
    assert f"iteration {saved + 1}/{STEPS}" in running.printed(0)
    assert f"iteration {saved}/{STEPS}" not in running.printed(0)
    metrics = json.loads((out / "metrics.json").read_text())
    one = tmp_path / "one"
    one.mkdir()
    expected = on_one_node(one, environment)
    assert metrics["loss_last"] == pytest.approx(expected[-1], rel=1e-6)
    assert expected[-1] < expected[saved - 1]


@pytest.mark.slow
def test_a_node_that_dies_ends_the_other(tmp_path: Path) -> None:
    """The first one, on which the store is: the other says itself what it has seen."""
    with job(tmp_path, SCRIPT=board_job(tmp_path)) as running:
        for node in range(NODES):
            wait_for_line(running, "is there", node=node)
        kill(running.processes(0)[::-1])
        begun = time.monotonic()
        assert running.end() != 0
        assert not running.requeued
    assert time.monotonic() - begun < BOUND
    assert "loongplug: error [rank 1]: " in running.printed(1)
