"""``slurm.sbatch`` with stand-ins of Slurm's commands: two nodes are processes of this machine."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from fake_slurm import NODES, ROOT, job, kill, wait_for_line
from ranks import run_ranks

from loongplug.training.run import run

STEPS = 16
BOUND = 30.0  # seconds; a collective of gloo or NCCL would wait for many minutes
STUB = '#!/bin/sh\nprintf "%s\\n" "$@" > "$FAKE_SLURM/words_${NODE_RANK:-0}"\n'
CPU = ("--device", "cpu", "--lr", "1e-3")
# Ranks that the failure board watches, without a model.
DIES = """
import os, sys, torch, torch.distributed as dist
from loongplug.parallel.failure import failure_board
with failure_board():
    dist.init_process_group("gloo")
    dist.barrier()
    print("rank", dist.get_rank(), "is there", flush=True)
    if os.environ.get("UNWELL") == str(dist.get_rank()):
        raise ValueError("this node is unwell")
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


@pytest.mark.quick
def test_each_node_has_its_number_and_the_first_one_s_address(tmp_path: Path) -> None:
    paths = {"MODEL_DIR": "model", "TRAIN_DATA": "rows.jsonl"}
    given = {"GPUS_PER_NODE": "4", "MASTER_PORT": "", **stub_python(tmp_path)}
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
        "#!/bin/bash\necho started; trap 'ended=1' TERM\n"
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


def losses(rank: int, *, flags: list[str]) -> list[float]:
    return [report.loss for report in run(flags)]


@pytest.fixture(scope="module")
def environment(
    demo: Path, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What ``sft.sh`` takes, for a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    first = [*flags, "--lr", "0", "--train-iters", "1", "--save-hf", str(folder)]
    run_ranks(losses, 1, flags=first, timeout=200.0)
    sizes = {"TP": "1", "GPUS_PER_NODE": "1", "SEQ_LENGTH": "80", "MICRO_BATCH_SIZE": "2"}
    sizes["PACKING"] = "false"
    steps = {"GLOBAL_BATCH_SIZE": "8", "TRAIN_ITERS": str(STEPS), "FREEZE_ENCODER": "false"}
    return {"MODEL_DIR": str(folder), "TRAIN_DATA": str(demo / "train.jsonl"), **sizes, **steps}


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


@pytest.mark.slow
def test_two_nodes_save_in_time_and_train_as_one_does(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Warned, the job saves and is queued again; then it goes on, and its loss is one node's."""
    out = tmp_path / "out"
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


@pytest.mark.slow
def test_an_error_on_one_node_ends_the_other_in_silence(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT=board_job(tmp_path), UNWELL="1") as running:
        for node in range(NODES):
            wait_for_line(running, "is there", node=node)
        begun = time.monotonic()
        assert running.end() == 1
        assert not running.requeued
    assert time.monotonic() - begun < BOUND
    assert running.printed(1).count("loongplug: error [rank 1]: this node is unwell") == 1
    assert "loongplug: error" not in running.printed(0)
