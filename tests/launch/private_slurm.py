"""A Slurm cluster of this user's own: a controller and two nodes on this machine, in a folder."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from eventually import eventually
from fake_slurm import ROOT

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
# Addresses as names: the first one's is where ranks meet, and a hosts file need not have it.
NODES = ("127.0.0.1", "127.0.0.2")
# Of whoever waits for a job that trains, on a busy machine.
SECONDS = 400.0
CONFIG = """
ClusterName=private
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
# How long a job waits that is queued again, too: two minutes unless said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
NodeName=127.0.0.[1-2] NodeAddr=127.0.0.1 NodeHostname=localhost Port=[{ports[1]},{ports[2]}] CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """Its commands, with jobs whose output is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [name for name in self._environment if name.startswith("SLURM_JOB")]:
            del self._environment[name]

    def does(self, *words: str | Path, **environment: str) -> str:
        """What a command prints that has to end well."""
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, node: str) -> None:
        """Start one node's daemon, which goes into the background."""
        self.does("slurmd", "-N", node)

    def submits(self, *words: str | Path, **environment: str) -> "Job":
        """A job of both nodes; its ranks meet at a free port, as other clusters have a job 1."""
        (port,) = free_ports(1)
        there = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_PORT": str(port)}
        there |= environment
        flags = ("--nodes", "2", "--gpus-per-node=0", "--output", self.folder / "%j.log")
        number = self.does("sbatch", "--parsable", *map(str, flags), *words, **there).strip()
        return Job(self, number)

    def kill(self, node: str) -> None:
        """Kill one node's daemon, of which the controller hears nothing."""
        daemon = int((self.folder / f"slurmd-{node}.pid").read_text())
        os.kill(daemon, signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(daemon))

    def processes(self, *, of_jobs: bool = False) -> list[psutil.Process]:
        """All that runs in jobs and, unless only ``of_jobs``, the daemons: all have one config."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                there = process.environ()
                ours = there.get("SLURM_CONF") == self._environment["SLURM_CONF"]
                if ours and (not of_jobs or "SLURM_JOB_ID" in there):
                    found.append(process)
        return found


class Job:
    """A job of the cluster, by its ``number``."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.number = number
        self._cluster = cluster

    @property
    def printed(self) -> str:
        file = self._cluster.folder / f"{self.number}.log"
        return file.read_text() if file.exists() else ""

    def told(self, name: str) -> str:
        """What ``scontrol show job`` calls so."""
        said = self._cluster.does("scontrol", "show", "job", self.number)
        found = re.search(rf"\b{name}=(\S*)", said)
        assert found is not None, said
        return found[1]

    def prints(self, text: str, *, times: int = 1) -> None:
        """Wait for it."""
        eventually(
            lambda: self.printed.count(text) >= times or self.told("JobState") == "FAILED",
            seconds=SECONDS,
        )
        assert self.printed.count(text) >= times, self.printed

    def ends(self) -> str:
        """Wait for the state that it ends in."""
        going = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING", "NODE_FAIL")
        eventually(lambda: self.told("JobState") not in going, seconds=SECONDS)
        return self.told("JobState")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """One that is up; no process of it is left behind."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    text = CONFIG.format(folder=folder, ports=free_ports(3), user=getpass.getuser())
    (folder / "slurm.conf").write_text(text)
    made = Cluster(folder)
    try:
        files = [f"--{each}-file={folder}/munge.{each}" for each in ("key", "pid", "log", "seed")]
        made.does("munged", "--force", f"--socket={folder}/munge.socket", *files)
        made.does("slurmctld")
        for node in NODES:
            made.start(node)
        eventually(lambda: made.does("sinfo", "--noheader", "--format=%T %D") == "idle 2\n")
        yield made
    finally:
        left = made.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=10)


def free_ports(number: int) -> list[int]:
    """Different ones."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def missing() -> list[str]:
    """Which of Slurm's programs this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]
