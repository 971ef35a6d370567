"""Slurm's commands as far as ``slurm.sbatch`` uses them; its nodes are processes of this machine.

``srun`` starts its command once for each node and waits for all of them. Unlike Slurm's it kills
nobody where one fails, so that tests see each node end by itself. ``scancel`` sends SIGTERM to
what ``srun`` has started, and to nothing below it, as Slurm does with cgroups.
"""

import os
import signal
import socket
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
NODES = 2
COMMANDS = {
    "srun": """#!/bin/bash
echo "$*" > "$FAKE_SLURM/srun"
while [[ "$1" == --* ]]; do shift; done
: > "$FAKE_SLURM/tasks"
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" > "$FAKE_SLURM/node_$node.log" 2>&1 &
    tasks+=($!)
    echo $! >> "$FAKE_SLURM/tasks"
done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "${code:-0}"
""",
    "scontrol": """#!/bin/bash
case "$1 $2" in
    "show hostnames") yes localhost | head -n "$SLURM_JOB_NUM_NODES" ;;
    requeue*) echo "$2" > "$FAKE_SLURM/requeued" ;;
    *) exit 1 ;;
esac
""",
    "scancel": """#!/bin/bash
if [[ -e "$FAKE_SLURM/busy" ]]; then rm "$FAKE_SLURM/busy"; exit 1; fi
[[ "$*" == "--signal=TERM $SLURM_JOB_ID" ]] && kill -TERM $(cat "$FAKE_SLURM/tasks")
""",
}


class Job:
    """A job of two nodes that runs ``slurm.sbatch``; ``folder`` holds what its nodes print."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.folder = folder
        for name, text in COMMANDS.items():
            command = folder / "bin" / name
            command.parent.mkdir(parents=True, exist_ok=True)
            command.write_text(text)
            command.chmod(0o755)
        (folder / "requeued").unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.process = subprocess.Popen(
            ["bash", ROOT / "scripts" / "launch" / "slurm.sbatch", *words],
            env={
                **os.environ,
                "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "FAKE_SLURM": str(folder),
                "SLURM_SUBMIT_DIR": str(ROOT),
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NODELIST": "gpu[07-08]",
                "SLURM_JOB_NUM_NODES": str(NODES),
                "SLURM_CPUS_ON_NODE": "2",
                "MASTER_PORT": str(port),
                **environment,
            },
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()

    def printed(self, node: int) -> str:
        file = self.folder / f"node_{node}.log"
        return file.read_text() if file.exists() else ""

    def processes(self, node: int) -> list[psutil.Process]:
        """What runs on a node, the task first and the ranks last."""
        task = psutil.Process(int((self.folder / "tasks").read_text().split()[node]))
        return [task, *task.children(recursive=True)]

    def warn(self) -> None:
        """What ``--signal`` does before the time limit, to the batch script alone."""
        self.process.send_signal(signal.SIGUSR1)

    def end(self) -> int:
        """Wait for the job's end; its exit code."""
        said, _ = self.process.communicate(timeout=200)
        print(said, *(self.printed(node) for node in range(NODES)), sep="\n")
        return self.process.returncode


@contextmanager
def job(folder: Path, *words: str, **environment: str):
    """A job, of which nothing is left behind."""
    running = Job(folder, *words, **environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            for node in range(NODES):
                with suppress(psutil.Error, OSError, IndexError):
                    kill(running.processes(node))
            running.process.kill()


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for_line(running: Job, text: str, *, node: int) -> None:
    """Until the node has printed it; the job must not have ended before."""
    eventually(lambda: text in running.printed(node) or running.process.poll() is not None)
    assert text in running.printed(node), running.printed(0) + running.printed(1)
