"""Of the runs that save into one folder one has the lock, and is named to the others."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loongplug.checkpoint import save_lock as module
from loongplug.checkpoint.save_lock import LOCK_FILE, save_lock

pytestmark = pytest.mark.quick

HOLD = """
import sys
from pathlib import Path
from loongplug.checkpoint.save_lock import save_lock
try:
    with save_lock(Path(sys.argv[1]), rank=0):
        print("held", flush=True)
        sys.stdin.read()  # until it is told to end
except ValueError as error:
    print(error, flush=True)
"""


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def take(folder: Path) -> None:
    with save_lock(folder, rank=0):
        pass


def test_a_second_run_is_refused_with_who_has_the_lock(tmp_path):
    first = start(tmp_path)
    try:
        assert said(first) == "held"
        with pytest.raises(ValueError, match="in use by another run") as raised:
            take(tmp_path)
        text = str(raised.value)
        assert f"process {first.pid} on {socket.gethostname()} since 20" in text
        assert "remove" not in text
        with save_lock(tmp_path, rank=1):  # the first rank speaks for all
            pass
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(60)
    assert (tmp_path / LOCK_FILE).exists()
    take(tmp_path)  # a dead process has nothing
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.not_quick
def test_of_runs_that_start_together_one_wins(tmp_path):
    for attempt in range(2):
        runs = [start(tmp_path / str(attempt)) for _ in range(3)]
        told = [said(run) for run in runs]  # the winner has the lock until all have tried
        for run in runs:
            run.communicate(timeout=60)
        assert [run.returncode for run in runs] == [0] * 3
        assert told.count("held") == 1
        winner = runs[told.index("held")].pid
        assert sum(f"process {winner} on" in text for text in told) == 2


def test_processes_that_a_run_forks_do_not_keep_its_lock(tmp_path):
    """A writer in the background may outlive its run."""
    child = os.fork()
    if child == 0:
        with save_lock(tmp_path, rank=0):
            writer = os.fork()
            if writer == 0:
                time.sleep(600)
            else:
                (tmp_path / "writer").write_text(str(writer))
            os._exit(0)  # as if killed
    os.waitpid(child, 0)
    try:
        take(tmp_path)
    finally:
        os.kill(int((tmp_path / "writer").read_text()), signal.SIGKILL)


def left(folder: Path, **changes: object) -> None:
    """A lock that a process left which no longer lives."""
    found = {
        "host": socket.gethostname(),
        "process": 2**22 + 1,
        "born": "1",
        "since": "2026-01-01 00:00:00 +0000",
        "job": "",
    }
    (folder / LOCK_FILE).write_text(json.dumps(found | changes))


@pytest.mark.parametrize("job", ["", "none"])
def test_another_hosts_lock_is_told_with_how_to_remove_it(tmp_path, monkeypatch, job):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    left(tmp_path, host="elsewhere")
    words = rf"process \d+ on elsewhere since 2026.* remove {tmp_path / LOCK_FILE}"
    with pytest.raises(ValueError, match=words):
        take(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()


def test_a_restart_by_torchrun_takes_over_what_its_earlier_attempt_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    for host in ("elsewhere", socket.gethostname()):
        left(tmp_path, host=host, job="mine")
        take(tmp_path)
    left(tmp_path, host="elsewhere", job="yours")
    with pytest.raises(ValueError, match="elsewhere"):
        take(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_lock_without_a_name_counts_for_nothing(tmp_path, text):
    (tmp_path / LOCK_FILE).write_text(text)
    take(tmp_path)


def test_a_kernels_lock_of_another_host_is_told_with_how_to_remove_it(tmp_path, monkeypatch):
    def taken(*args: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "lockf", taken)
    left(tmp_path, host="elsewhere")
    with pytest.raises(ValueError, match=rf"on elsewhere .* remove {tmp_path / LOCK_FILE}"):
        take(tmp_path)


@pytest.fixture
def no_kernel_locks(monkeypatch):
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    monkeypatch.setattr(module, "_SETTLED_SECONDS", 0.01)


@pytest.mark.usefixtures("no_kernel_locks")
def test_where_the_kernel_knows_no_locks_the_text_decides(tmp_path):
    left(tmp_path)
    take(tmp_path)
    left(tmp_path, process=os.getppid())  # its number, of a process that began later
    take(tmp_path)
    left(tmp_path, process=os.getppid(), born=module._born(str(os.getppid())))
    with pytest.raises(ValueError, match="in use by another run") as raised:
        take(tmp_path)
    assert "remove" not in str(raised.value)


@pytest.mark.usefixtures("no_kernel_locks")
@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        (lambda folder: left(folder, host="elsewhere"), "elsewhere"),  # overwritten
        (lambda folder: (folder / LOCK_FILE).write_text(""), "another process"),  # emptied
        (lambda folder: (folder / LOCK_FILE).unlink(), "another process"),  # removed
    ],
)
def test_a_run_whose_text_is_gone_is_refused(tmp_path, monkeypatch, meanwhile, told):
    left(tmp_path)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: meanwhile(tmp_path))
    with pytest.raises(ValueError, match=rf"in use by another run .*{told}"):
        take(tmp_path)


def test_a_lock_that_goes_while_it_is_waited_for_is_none(tmp_path, monkeypatch):
    """The run before removes the file between this one's opening and locking it."""
    lock, tries = fcntl.lockf, []

    def lose(held: int, how: int) -> None:
        tries.append(held)
        if len(tries) == 1:
            (tmp_path / LOCK_FILE).unlink()
        lock(held, how)

    monkeypatch.setattr(fcntl, "lockf", lose)
    with save_lock(tmp_path, rank=0):
        assert len(tries) == 2
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == str(os.getpid())
