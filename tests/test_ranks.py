"""The harness itself: what every other distributed test relies on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eventually import eventually
from megatron.core import parallel_state
from ranks import RankError, model_parallel, run_ranks

from loongplug.verify import ranks as forked_ranks

pytestmark = pytest.mark.quick


def _children() -> set[str]:
    """Processes that have this one as parent, zombies too."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return {line.strip() for line in found.stdout.splitlines()}


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = _children()
    yield
    assert len(_children() - before) <= 1  # ps itself
    assert list(tmp_path.iterdir()) == []


def _import_nothing(rank: int, *, known: set[str]) -> tuple[float, set[str]]:
    with model_parallel(tp=2, pp=2):
        value = torch.ones(1)
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return value.item(), set(sys.modules) - known


def test_ranks_import_nothing_that_their_parent_has_not() -> None:
    run_ranks(_import_nothing, 4, known=set())  # whatever a first group imports
    assert run_ranks(_import_nothing, 8, known=set(sys.modules)) == [(2.0, set())] * 8


def _fail_alone(rank: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("the one that went wrong")
    dist.all_reduce(torch.ones(1))


def test_exception_in_one_rank_while_others_wait_in_a_collective() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fail_alone, 4, timeout=3600)  # which this test does not have
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("rank 1 failed")
    assert "ValueError: the one that went wrong" in text
    assert "rank 1 was here" in text


def _crash(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(torch.ones(1))


def test_rank_that_crashes() -> None:
    with pytest.raises(RankError, match="killed by signal SIGSEGV") as caught:
        run_ranks(_crash, 2)
    assert caught.value.rank == 1
    assert "in _crash" in str(caught.value)  # faulthandler's stack, from what it printed


def _hang_in_python() -> None:
    time.sleep(600)


def _hang(rank: int, *, folder: Path) -> int:
    (folder / str(rank)).touch()
    if rank == 0:
        return rank
    if rank == 1:
        dist.recv(torch.ones(1), src=2)
    _hang_in_python()
    return rank


@pytest.mark.not_quick
def test_hang_shows_the_stack_of_each_rank_alive(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wait = tmp_path_factory.mktemp("there"), forked_ranks._wait

    def wait_when_all_are_there(*args: Any, deadline: float, **options: Any) -> Any:
        eventually(lambda: len(list(folder.iterdir())) == 3)
        return wait(*args, deadline=time.monotonic() + 1.0, **options)

    monkeypatch.setattr(forked_ranks, "_wait", wait_when_all_are_there)
    with pytest.raises(RankError, match="after 1 s these ranks still ran: 0, 1, 2") as caught:
        run_ranks(_hang, 3, timeout=1.0, folder=folder)
    assert "in barrier" in caught.value.errors[0]  # done, waiting for the others
    assert "in recv" in caught.value.errors[1]
    assert "in _hang_in_python" in caught.value.errors[2]


def _start_a_process(rank: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


@pytest.mark.not_quick
def test_processes_of_a_rank_end_with_it() -> None:
    for pid in run_ranks(_start_a_process, 2):
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists())


def _print(rank: int) -> None:
    print(f"hello from {rank}")
    print(f"warning from {rank}", file=sys.stderr)
    os.system(f"echo nested {rank}")


def test_what_ranks_print_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_print, 2)
    printed = capsys.readouterr().out
    assert printed.index("[rank 0]") < printed.index("hello from 0") < printed.index("[rank 1]")
    assert "warning from 1" in printed
    assert "nested 1" in printed


def _backward(rank: int) -> float:
    weight = torch.ones(4, requires_grad=True)
    (weight * rank).sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad[0].item()


def test_backward_in_the_parent_does_not_harm_the_ranks() -> None:
    torch.ones(4, requires_grad=True).sum().backward()
    assert run_ranks(_backward, 2) == [1.0, 1.0]


def _listens_at(rank: int) -> set[str]:
    """Addresses at which this process waits for others once its groups are there."""
    dist.barrier()
    dist.barrier(dist.new_group([0, 1]))
    sockets = {
        os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.islink(each)
    }
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {".".join(map(str, reversed(bytes.fromhex(each[:8])))) for each in listening}


def test_runs_side_by_side_meet_at_addresses_of_their_own() -> None:
    """A rank that has lost its peer may go on connecting to a port that another run has by then."""
    first, second = (run_ranks(_listens_at, 2) for _ in range(2))
    assert len(first[0]) == 1
    assert first[0] == first[1]
    assert first[0].isdisjoint({"127.0.0.1", *second[0]})
