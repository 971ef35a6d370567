"""One rank fails: every rank says so and ends with the same code, wherever it was."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch.distributed.checkpoint import CheckpointException

from loongplug.parallel import failure
from loongplug.parallel.failure import failure_board

pytestmark = pytest.mark.quick

RANKS = 4


def _enter(rank: int, *, work: Any, path: str | None = None, port: int | None = None) -> str:
    """``work(rank)`` behind the board, as a training main is; the store is torchrun's by port."""
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    factory = None if path is None else lambda timeout: dist.FileStore(path, RANKS)
    with failure_board(factory):
        work(rank)
    assert not [t for t in threading.enumerate() if t.name == "loongplug-failure-board"]
    return "clean"


def _failed_run(work: Any, **where: Any) -> tuple[dict[int, str], dict[int, str], float]:
    """What the harness says of each rank, what each rank printed, and the seconds it took."""
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_enter, RANKS, timeout=40, work=work, **where)
    sections = re.findall(
        r"----- rank (\d) printed -----\n(.*?)(?=\n-----|\Z)", str(caught.value), flags=re.DOTALL
    )
    printed = {int(rank): text for rank, text in sections}
    return caught.value.errors, printed, time.monotonic() - started


@pytest.fixture
def port() -> Iterator[int]:
    """A store served by this process, as torchrun's agent serves one to its ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def _collective_forever() -> None:
    """Wait for the failing rank in a collective, with no connection to it that could break."""
    others = dist.new_group([0, 1, 3])
    dist.barrier(group=others)
    dist.recv(torch.ones(1), src=2)


def _one_fails(rank: int) -> None:
    if rank == 2:
        dist.new_group([0, 1, 3])
        time.sleep(0.3)
        raise ValueError("tp 3 does not divide\n16 heads")
    _collective_forever()


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_one_rank_fails_while_others_wait(store: str, tmp_path: Path, port: int) -> None:
    where = {"path": str(tmp_path / "store")} if store == "file" else {"port": port}
    errors, printed, seconds = _failed_run(_one_fails, **where)
    assert seconds < 15
    assert set(errors) == set(range(RANKS))
    assert all("exited with code 1" in text for text in errors.values())
    assert printed[2] == "loongplug: error [rank 2]: tp 3 does not divide\n16 heads"
    for rank in (0, 1, 3):
        assert printed[rank].splitlines() == [
            f"loongplug: error [rank {rank}]: rank 2 failed: tp 3 does not divide 16 heads"
        ]


def _all_fail(rank: int) -> None:
    raise ValueError("no such file: model.yaml")


def test_all_ranks_fail_alike(port: int) -> None:
    errors, printed, seconds = _failed_run(_all_fail, port=port)
    assert seconds < 10
    assert all("exited with code 1" in text for text in errors.values())
    for rank in range(RANKS):
        assert printed[rank].count("no such file: model.yaml") == 1
        assert printed[rank].startswith(f"loongplug: error [rank {rank}]: ")
        assert "Traceback" not in printed[rank]


def _unexpected(rank: int) -> None:
    if rank == 0:
        raise KeyError("gone")
    _sleep_in_python()


def _sleep_in_python() -> None:
    while True:
        time.sleep(0.1)


def test_unexpected_exceptions_keep_their_traceback(port: int) -> None:
    errors, printed, _ = _failed_run(_unexpected, port=port)
    assert set(errors) == set(range(RANKS))
    assert "Traceback" in printed[0]
    assert 'raise KeyError("gone")' in printed[0]
    assert printed[0].endswith("loongplug: error [rank 0]: KeyError: 'gone'")
    assert printed[3] == "loongplug: error [rank 3]: rank 0 failed: KeyError: 'gone'"


def _exits(rank: int) -> None:
    if rank == 1:
        sys.exit(7)
    _sleep_in_python()


def test_all_end_with_the_code_of_the_first(port: int) -> None:
    errors, printed, _ = _failed_run(_exits, port=port)
    assert {r: "exited with code 7" in text for r, text in errors.items()} == dict.fromkeys(
        range(RANKS), True
    )
    assert printed[0] == "loongplug: error [rank 0]: rank 1 failed: exited with code 7"


def _enter_deaf(rank: int, *, path: str) -> None:
    """Rank 3 never looks at the board: the others must not wait for it for long."""

    def factory(timeout: timedelta) -> dist.Store:
        if rank == 3:
            time.sleep(3600)
        return dist.FileStore(path, RANKS)

    failure.PARTING_SECONDS = 0.5
    with failure_board(factory):
        if rank == 0:
            raise ValueError("told in vain")
        _sleep_in_python()


def test_a_rank_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_enter_deaf, RANKS, path=str(tmp_path / "store"), timeout=30)
    assert time.monotonic() - started < 10
    assert "was stopped" in caught.value.errors[3]
    for rank in (0, 1, 2):
        assert "exited with code 1" in caught.value.errors[rank]


def _clean(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        sys.exit(0)


def _enter_clean(rank: int, *, path: str) -> tuple[str, bool]:
    end = "clean"
    try:
        _enter(rank, work=_clean, path=path)
    except SystemExit as exit_:
        end = f"exit {exit_.code}"
    dist.barrier()
    return end, dist.FileStore(path, RANKS).check(["failed"])


def test_a_clean_end_posts_nothing_and_takes_no_time(tmp_path: Path) -> None:
    started = time.monotonic()
    ends = run_ranks(_enter_clean, RANKS, path=str(tmp_path / "store"))
    assert time.monotonic() - started < 5
    assert ends == [("clean", False), ("exit 0", False), ("clean", False), ("clean", False)]


def _terminated(rank: int, *, path: str) -> bool:
    """A process behind the board is told to end, as torchrun and schedulers do."""
    pid = os.fork()
    if pid == 0:
        with failure_board(lambda timeout: dist.FileStore(path, RANKS)):
            if rank == 0:
                sys.exit(128 + signal.SIGTERM)  # what a handler of it may do
            _sleep_in_python()
    time.sleep(0.3)
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    dist.barrier()
    return dist.FileStore(path, RANKS).check(["failed"])


def test_an_end_by_sigterm_posts_nothing(tmp_path: Path) -> None:
    assert run_ranks(_terminated, 2, path=str(tmp_path / "store")) == [False, False]


class TestOneProcess:
    """Without other ranks there is no board, but the same messages and codes."""

    @pytest.fixture(autouse=True)
    def _alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", failure.TRACEBACK_VARIABLE):
            monkeypatch.delenv(name, raising=False)

    def _end(self, error: BaseException) -> Any:
        with pytest.raises(SystemExit) as caught, failure_board():
            raise error
        return caught.value.code

    def test_user_errors_are_one_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(ValueError("--tp 3 does not divide 16 heads")) == 1
        assert (
            capsys.readouterr().err
            == "loongplug: error [rank 0]: --tp 3 does not divide 16 heads\n"
        )

    def test_traceback_on_demand(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(failure.TRACEBACK_VARIABLE, "1")
        assert self._end(ValueError("bad")) == 1
        printed = capsys.readouterr().err
        assert "Traceback" in printed
        assert printed.endswith("loongplug: error [rank 0]: bad\n")

    def test_unexpected_errors_show_where(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(RuntimeError("boom")) == 1
        printed = capsys.readouterr().err
        assert "Traceback" in printed
        assert "loongplug: error [rank 0]: RuntimeError: boom" in printed

    def test_what_is_no_exception_is_told_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(CheckpointException("read", {})) == 1
        assert "loongplug: error [rank 0]: CheckpointException" in capsys.readouterr().err

    def test_exits_keep_their_code(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(SystemExit(2)) == 2
        assert self._end(SystemExit(None)) is None
        assert capsys.readouterr().err == ""
        assert self._end(SystemExit("no data")) == 1
        assert capsys.readouterr().err == "loongplug: error [rank 0]: no data\n"

    def test_interrupts_pass(self) -> None:
        with pytest.raises(KeyboardInterrupt), failure_board():
            raise KeyboardInterrupt

    def test_no_error(self) -> None:
        with failure_board():
            pass
