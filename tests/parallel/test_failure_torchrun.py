"""The failure board as torchrun's ranks use it: with the store of its agent."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import loongplug
from loongplug.parallel import exit_notes, launch
from loongplug.parallel.rank_programs import ranks_command

ROOT = str(Path(loongplug.__file__).parents[1])


TORCHRUN, OURS = "torch.distributed.run", "loongplug.parallel.launch"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, OURS])
def test_under_torchrun(tmp_path: Path, launcher: str) -> None:
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
    done = subprocess.run(
        [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=3", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
    )
    assert done.returncode != 0
    assert "loongplug: error [rank 1]: the second rank is unwell" in done.stderr
    assert done.stderr.count("the second rank is unwell") == 1
    assert "[rank 0]" not in done.stderr
    if launcher == TORCHRUN:  # its own table says whose message it was
        # By the second failure it ends the third rank, which may not have said anything yet.
        told = [line for line in done.stderr.splitlines() if line.startswith("  traceback :")]
        theirs = [line for line in told if "Signal 15" not in line]
        assert theirs
        assert "exitcode: 1" in done.stderr
        assert set(theirs) == {"  traceback : see the message of rank 1"}
        assert told[-1] in theirs, "the root cause"
    else:
        assert done.returncode == 1
        assert done.stderr == "loongplug: error [rank 1]: the second rank is unwell\n"


def launched(torchrun: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our launcher, where torchrun does this."""
    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    for name in ("TORCHELASTIC_ERROR_FILE", exit_notes.FOLDER_VARIABLE):
        monkeypatch.setenv(name, "")  # main sets them
    launch.main()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("codes", "said", "code"),
    [
        ({0: 1, 1: 1}, "", 1),
        ({0: -signal.SIGTERM, 1: 7}, "", 7),
        ({3: -signal.SIGKILL}, "loongplug: rank 3 was ended by SIGKILL\n", 137),
    ],
)
def test_our_launcher_tells_of_what_cannot_speak(
    codes: dict[int, int],
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def torchrun() -> None:
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # which torchrun removes and writes
        assert str(file.parent) == os.environ[exit_notes.FOLDER_VARIABLE]
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
            for rank, code in codes.items()
        }
        for failure in failures.values():  # torchrun has the first one's time
            failure.timestamp += failure.exitcode == -signal.SIGTERM
        raise ChildFailedError("train.py", failures)

    with pytest.raises(SystemExit) as ended:
        launched(torchrun, monkeypatch)
    assert ended.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.quick
def test_a_port_in_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def torchrun() -> None:
        raise DistNetworkError("port: 29500, name: EADDRINUSE")

    with pytest.raises(SystemExit) as ended:
        launched(torchrun, monkeypatch)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "EADDRINUSE" in line
    assert "give --master-port" in line


@pytest.mark.quick
@pytest.mark.parametrize("context", [MultiprocessContext, SubprocessContext])
def test_no_signal_comes_between_a_rank_and_the_note_of_it(
    context: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = []

    def start(self: None) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        noted.append("the rank")

    for each in (MultiprocessContext, SubprocessContext):
        monkeypatch.setattr(each, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        launched(lambda: context._start(None), monkeypatch)
    assert noted == ["the rank"]


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "code"), [("raise ValueError('full')", 1), ("pass", 143), (KILLED, 137)]
)
def test_told_to_end_our_launcher_says_whether_ranks_could_save(
    then: str, code: int, tmp_path: Path
) -> None:
    """Torchrun alone ends by 143 in both cases, and a job would be queued again without a save."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, time
            from loongplug.parallel.exit_notes import saves_when_told
            from loongplug.parallel.failure import failure_board
            told = []
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
            with failure_board():
                saves_when_told()
                print("ready", flush=True)
                while not told:
                    time.sleep(0.05)
                if os.environ["RANK"] == "1":
                    {then}
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, "-m", OURS, "--standalone", "--nproc-per-node=2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=100)
    assert process.returncode == code, said
    assert ("loongplug: error [rank 1]: full" in said) == (code == 1)
    assert ("loongplug: rank 1 was killed before it had saved" in said) == (code == 137)
    assert "rank 0" not in said


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_run_saves_is_no_good_end(
    flags: list[str], tmp_path: Path
) -> None:
    """Ranks that are forked know of the launcher's folder, too, and the other one's code counts."""
    more = ["--train-iters", "1000", "--save", str(tmp_path / "save"), "--save-interval", "1000"]
    log = tmp_path / "log"
    with (
        log.open("w") as to,
        subprocess.Popen(
            ranks_command("-m", "loongplug.train", *flags, *more, ranks=2),
            stdout=to,
            stderr=to,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
        ) as process,
    ):
        eventually(lambda: "iteration 2/" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        rank = a_rank_of(process.pid)
        rank.suspend()  # nothing can be saved without it
        process.send_signal(signal.SIGTERM)
        eventually(lambda: f"Closing process {rank.pid} via signal SIGTERM" in log.read_text())
        rank.kill()
    said = log.read_text()
    assert process.returncode == 1, said
    assert said.count("was killed before it had saved") == 1
    assert said.count("loongplug: error [rank") == 1
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


def a_rank_of(launcher: int) -> psutil.Process:
    """One of the two that the launcher's child with the imports has forked."""
    for child in psutil.Process(launcher).children():
        ranks = child.children()
        if len(ranks) == 2:
            return ranks[0]
    raise AssertionError("no ranks")
