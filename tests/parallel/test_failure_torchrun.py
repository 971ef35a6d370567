"""The failure board as torchrun's ranks use it: with the store of its agent."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import loongplug
from loongplug.parallel import launch

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
    assert "exitcode: 1" in done.stderr
    if launcher == TORCHRUN:  # its own table says whose message it was
        # By the second failure it ends the third rank, which may not have said anything yet.
        told = [line for line in done.stderr.splitlines() if line.startswith("  traceback :")]
        theirs = [line for line in told if "Signal 15" not in line]
        assert theirs
        assert set(theirs) == {"  traceback : see the message of rank 1"}
        assert told[-1] in theirs, "the root cause"
    else:
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) < 5


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
        failures = {
            rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
            for rank, code in codes.items()
        }
        for failure in failures.values():  # torchrun has the first one's time
            failure.timestamp += failure.exitcode == -signal.SIGTERM
        raise ChildFailedError("train.py", failures)

    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [("raise ValueError('full')", 1), ("pass", 143)])
def test_told_to_end_our_launcher_says_whether_ranks_could_save(
    then: str, code: int, tmp_path: Path
) -> None:
    """Torchrun alone ends by 143 in both cases, and a job would be queued again without a save."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, time
            from loongplug.parallel.failure import failure_board
            told = []
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
            with failure_board():
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
