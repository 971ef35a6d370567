"""Ranks that torchrun has not started: who they are, and where they meet."""

import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from socket import create_server

import pytest

import loongplug
from loongplug import platform, train
from loongplug.parallel import rendezvous
from loongplug.parallel.rendezvous import met_store, served_store, take_rank, this_rank
from loongplug.train import started

ROOT = str(Path(loongplug.__file__).parents[1])
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
AGENTS = "TORCHELASTIC_USE_AGENT_STORE"


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without a rank's variables; what is set there is gone behind a test."""
    theirs = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "MPI_")
    for name in [*NAMES, *filter(lambda name: name.startswith(theirs), os.environ), AGENTS]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "rank", "size"),
    [
        *((dict(zip(names, "351", strict=True)), 3, 5) for names in STARTERS),
        ({}, 0, 1),
        # one torchrun on each node
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 1, 2),
        ({"SLURM_NTASKS": "8"}, 0, 1),  # salloc -n 8: its shell, in which nothing is started
        (SHELL | {"SLURM_STEP_NUM_TASKS": "1"}, 0, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 0, 1),  # sbatch -n 1: its script
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2),
        # mpirun in a job's shell
        (SHELL | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, 3, 4),
    ],
)
def test_a_starter_says_rank_and_size(
    starter: pytest.MonkeyPatch, given: dict[str, str], rank: int, size: int
) -> None:
    for name, value in given.items():
        starter.setenv(name, value)
    assert take_rank() == this_rank() == (rank, size)
    assert size != 5 or os.environ["LOCAL_RANK"] == "1"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        ("3", None, "RANK is 3 with WORLD_SIZE not given: expected both"),
        (None, "2", "RANK is not given with WORLD_SIZE 2: expected both"),
        ("abc", "2", "RANK is 'abc': expected a whole number"),
        ("-1", "2", "RANK is '-1': expected"),
        ("0", "", "WORLD_SIZE is '': expected"),
        ("0", "0", "RANK is 0 with WORLD_SIZE 0: expected both, and a number below the size"),
        ("2", "2", "RANK is 2 with WORLD_SIZE 2"),
    ],
)
def test_numbers_that_are_none(
    starter: pytest.MonkeyPatch, rank: str | None, size: str | None, said: str
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is not None:
            starter.setenv(name, value)
    for read in (take_rank, this_rank):
        with pytest.raises(ValueError, match=said):
            read()


@pytest.mark.quick
def test_a_job_s_script_is_no_rank_of_several(starter: pytest.MonkeyPatch) -> None:
    """Slurm numbers it as it numbers tasks; the others would never come."""
    for name, value in {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}.items():
        starter.setenv(name, value)
    with pytest.raises(ValueError, match="SLURM_NTASKS is 8, but a job's script runs once: start"):
        take_rank()
    starter.setenv("RANK", "0")
    starter.setenv("WORLD_SIZE", "1")
    assert take_rank() == (0, 1)


@pytest.mark.quick
def test_a_rank_0_that_does_not_come_is_a_sentence_within_the_limit(
    starter: pytest.MonkeyPatch,
) -> None:
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    starter.setenv("MASTER_ADDR", "127.0.0.1")
    starter.setenv("MASTER_PORT", str(port))
    with pytest.raises(ValueError, match=rf"rank 0 was not at 127.0.0.1:{port} within 0:00:01: g"):
        met_store(1, limit=timedelta(seconds=1), purpose="start")


@pytest.mark.quick
def test_where_ranks_meet(starter: pytest.MonkeyPatch) -> None:
    assert served_store(on_gpus=True) is None  # alone
    starter.setenv("RANK", "1")
    starter.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 ranks without MASTER_ADDR: give all the name"):
        served_store(on_gpus=False)
    for nodes, first in (("n[03-05,9],m1", "n03"), ("m1,m2", "m1"), ("m-7", "m-7")):
        for name in ("MASTER_ADDR", "MASTER_PORT", AGENTS):
            starter.delenv(name, raising=False)
        starter.setenv("SLURM_JOB_NODELIST", nodes)
        starter.setenv("SLURM_JOB_ID", "1234567")
        assert take_rank() == (1, 2)
        assert served_store(on_gpus=False) is None
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (first, "24567")


@pytest.mark.quick
def test_a_port_in_use_is_a_sentence(starter: pytest.MonkeyPatch) -> None:
    with create_server(("", 0)) as taken:
        for name, value in zip(NAMES, ("0", "2", "0", "127.0.0.1"), strict=False):
            starter.setenv(name, value)
        starter.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ValueError, match=r"MASTER_PORT \d+ cannot be served .*EADDRINUSE"):
            served_store(on_gpus=False)


@pytest.mark.quick
@pytest.mark.parametrize(("device", "said"), [("cuda", "LOCAL_RANK"), ("cpu", "MASTER_ADDR")])
def test_on_gpus_no_two_ranks_of_a_machine_take_the_first(
    starter: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str, said: str
) -> None:
    starter.setenv("RANK", "1")
    starter.setenv("WORLD_SIZE", "2")
    starter.setattr(platform, "choose_device", lambda _: device)
    starter.setattr(platform, "activate", lambda _: pytest.fail("behind the refusal"))
    with pytest.raises(SystemExit), started([]):
        pass
    told = f"loongplug: error [rank 1]: 2 ranks without {said}: give "
    assert capsys.readouterr().err.startswith(told)


def test_ranks_without_torchrun_meet_and_end(tmp_path: Path) -> None:
    """One process is rank 1 by Slurm, one rank 0; then a second rank 1 comes."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch.distributed as dist
            from datetime import timedelta
            from loongplug.parallel.failure import failure_board
            from loongplug.parallel.rendezvous import met_store, served_store
            with failure_board():
                served = served_store(on_gpus=False)
                rank = int(os.environ["RANK"])
                store = met_store(rank, limit=timedelta(minutes=5), purpose="start")
                if sys.argv[1] == "twice":
                    store.set(f"{rank} came", "1")
                    store.get("1 came")
                    store.get("never")
                if sys.argv[1] == "meet":
                    dist.init_process_group("gloo")
                    dist.barrier()
                    print("met", flush=True)
            """
        )
    )
    with create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    plain = {name: value for name, value in os.environ.items() if name not in NAMES}
    plain |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    plain |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def started(rank: int, size: int, how: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), how],
            env=plain | {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    met = [started(rank, 2, "meet") for rank in (1, 0)]
    said = [each.communicate(timeout=200) for each in met]
    assert [each.returncode for each in met] == [0, 0], said
    assert all("met\n" in out for out, _ in said)
    twice = [started(rank, 3, "twice") for rank in (0, 1, 1)]
    errors = [each.communicate(timeout=200)[1] for each in twice]
    assert {each.returncode for each in twice} == {1}
    assert "".join(errors).count("rank 1 was started twice, as process ") == 1
    assert "Traceback" not in "".join(errors)


@pytest.mark.quick
def test_a_command_line_is_checked_early_where_no_starter_gave_a_rank() -> None:
    """``loongplug.train`` names starters itself, since this module imports torch."""
    assert {*train._RANKS} == {rank for rank, *_ in rendezvous._STARTERS}
