"""One rank fails: it says so, and all end with the same code, wherever they were."""

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
import ranks
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch.distributed.checkpoint import CheckpointException

from loongplug.parallel import failure
from loongplug.parallel.failure import SharedFaultError, failure_board

pytestmark = pytest.mark.quick

RANKS = 4


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work nobody is taken for lost: the harness ends what would wait for too long."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(failure, "PARTING_SECONDS", 0.3)
    monkeypatch.setattr(failure, "WATCH_SECONDS", 0.05)


def _write_text(file: Any) -> None:
    """As a library that says something else."""
    try:
        file.write(b"text")
    except OSError:
        raise RuntimeError("cannot write") from None


def _enter(rank: int, *, work: Any, path: str | None = None, port: int | None = None) -> str:
    """``work(rank)`` behind the board, as a training main is; the store is torchrun's by port."""
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    factory = None if path is None else lambda timeout: dist.FileStore(path, RANKS)
    with failure_board(factory):
        work(rank)
    assert not [t for t in threading.enumerate() if t.name == "loongplug-failure-board"]
    return "clean"


def _failed_run(work: Any, **where: Any) -> tuple[dict[int, str], dict[int, str]]:
    """What the harness says of each rank, and what each rank printed."""
    with pytest.raises(RankError) as caught:
        run_ranks(_enter, RANKS, work=work, **where)
    sections = re.findall(
        r"----- rank (\d) printed -----\n(.*?)(?=\n-----|\Z)", str(caught.value), flags=re.DOTALL
    )
    printed = {int(rank): text for rank, text in sections}
    return caught.value.errors, printed


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


def test_one_rank_fails_while_others_wait(port: int) -> None:
    errors, printed = _failed_run(_one_fails, port=port)
    assert set(errors) == set(range(RANKS))
    assert all("exited with code 1" in text for text in errors.values())
    assert printed == {2: "loongplug: error [rank 2]: tp 3 does not divide\n16 heads"}


def _enter_with_something_to_tidy(rank: int, *, port: int, left: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with failure_board() as at_end:
        at_end((left / f"of rank {rank}").unlink)
        at_end(lambda: 1 / 0)  # which takes nothing with it
        at_end((left / f"more of rank {rank}").unlink)
        _one_fails(rank)


@pytest.mark.not_quick
def test_what_another_rank_ends_tidies_up(port: int, tmp_path: Path) -> None:
    for rank in range(RANKS):
        (tmp_path / f"of rank {rank}").touch()
        (tmp_path / f"more of rank {rank}").touch()
    with pytest.raises(RankError, match="tp 3 does not divide"):
        run_ranks(_enter_with_something_to_tidy, RANKS, port=port, left=tmp_path)
    # The rank that failed has left its own contexts by then.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more of rank 2", "of rank 2"]


def _all_fail(rank: int) -> None:
    raise ValueError("no such file: model.yaml")


def _one_fault_in_own_words(rank: int) -> None:
    raise SharedFaultError(f"rank {rank}: step 2 is not finite", turn=0 if rank == 2 else 4)


def _others_lose_it(rank: int) -> None:
    if rank == 2:
        time.sleep(0.2)
        raise ValueError("the third rank is unwell")
    raise RuntimeError(f"[gloo/pair.cc:5{rank}] Connection closed by peer [127.0.0.1]:{rank}")


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("work", "told"),
    [
        (_all_fail, "no such file: model.yaml"),
        # Who knows most of a fault comes first.
        (_one_fault_in_own_words, "rank 2: step 2 is not finite"),
        # That another rank is gone is said where nothing better is.
        (_others_lose_it, "the third rank is unwell"),
    ],
)
def test_where_all_ranks_fail_one_tells(
    port: int, monkeypatch: pytest.MonkeyPatch, work: Any, told: str
) -> None:
    monkeypatch.setattr(failure, "TURN_SECONDS", 5.0)
    errors, printed = _failed_run(work, port=port)
    assert all("exited with code 1" in text for text in errors.values())
    ((teller, text),) = printed.items()
    assert text == f"loongplug: error [rank {teller}]: {told}"


def _one_is_killed(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.recv(torch.ones(1), src=2)
    _sleep_in_python()


@pytest.mark.not_quick
def test_that_a_rank_was_killed_is_one_sentence_alone(port: int) -> None:
    """And nothing of gloo's, which rank 1 has it from."""
    errors, printed = _failed_run(_one_is_killed, port=port)
    assert errors.pop(2) == "was killed by signal SIGKILL"
    assert all("exited with code 1" in text for text in errors.values())
    assert printed.keys() == {1}
    assert re.fullmatch(
        r"loongplug: error \[rank 1\]: another rank has ended or does not answer "
        r"\(connection (closed|reset) by peer\); LOONGPLUG_TRACEBACK=1 shows where this one was",
        printed[1],
        re.IGNORECASE,
    ), printed


def _enter_without_a_store(rank: int) -> None:
    """The store is gone once all of them watch."""
    dist.barrier()  # none ends while others still connect to it

    def factory(timeout: timedelta) -> dist.Store:
        if threading.current_thread() is threading.main_thread():
            raise dist.DistNetworkError("no store")
        return dist.HashStore()

    with failure_board(factory):
        raise ValueError("nobody else can say it")


@pytest.mark.not_quick
def test_without_a_store_nothing_is_lost() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_enter_without_a_store, RANKS)
    for rank in range(RANKS):
        assert f"loongplug: error [rank {rank}]: nobody else can say it" in str(caught.value)


def _interrupted(rank: int) -> None:
    """Ctrl-C reaches every rank, but not one that is busy elsewhere."""
    if rank == 3:
        _sleep_in_python()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    _sleep_in_python()


def _enter_interrupted(rank: int, *, port: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it
    _enter(rank, work=_interrupted, port=port)


@pytest.mark.not_quick
def test_ctrl_c_ends_all_in_one_line(port: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_enter_interrupted, RANKS, port=port)
    assert all("exited with code 130" in text for text in caught.value.errors.values())
    assert len(caught.value.errors) == RANKS
    assert str(caught.value).count("loongplug: interrupted") == 1
    assert "Traceback" not in str(caught.value)


def _signalled(rank: int) -> None:
    """torchrun ends the others as soon as one has died, also those that are about to speak."""
    if rank != 1:
        _sleep_in_python()
    comes = failure.comes

    def told_to_end(*args: Any, **options: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return comes(*args, **options)

    failure.comes = told_to_end
    raise ValueError("said all the same")


@pytest.mark.not_quick
def test_sigterm_does_not_take_away_the_message(port: int) -> None:
    _, printed = _failed_run(_signalled, port=port)
    assert printed == {1: "loongplug: error [rank 1]: said all the same"}


def _unexpected(rank: int) -> None:
    if rank == 0:
        raise KeyError("gone")
    _sleep_in_python()


def _exits(rank: int) -> None:
    if rank == 0:
        sys.exit(7)
    _sleep_in_python()


def _sleep_in_python() -> None:
    while True:
        time.sleep(0.1)


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (_unexpected, 1, r'(?s)Traceback.*raise KeyError\("gone"\).*rank 0]: KeyError: \'gone\'$'),
        (_exits, 7, r"^loongplug: error \[rank 0]: exited with code 7$"),
    ],
)
def test_the_first_s_code_and_words_are_all_s(port: int, work: Any, code: int, said: str) -> None:
    """Also of an exception that nobody expects, which keeps its traceback."""
    errors, printed = _failed_run(work, port=port)
    assert set(errors) == set(range(RANKS))
    assert all(f"exited with code {code}" in text for text in errors.values())
    assert set(printed) == {0}
    assert re.search(said, printed[0])


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
    return end, dist.FileStore(path, RANKS).check([failure._FIRST_ERROR])


def test_a_clean_end_posts_nothing(tmp_path: Path) -> None:
    ends = run_ranks(_enter_clean, RANKS, path=str(tmp_path / "store"))
    assert ends == [(end, False) for end in ("clean", "exit 0", "clean", "clean")]


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
    return dist.FileStore(path, RANKS).check([failure._FIRST_ERROR])


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

    @pytest.mark.parametrize("save", [lambda file: torch.save({"a": 1}, file), _write_text])
    def test_a_full_disk_is_one_line_whatever_a_library_says(
        self, save: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises((OSError, RuntimeError)) as caught, open("/dev/full", "wb", 0) as file:
            save(file)
        assert self._end(caught.value) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written ([Errno 28] No space left on device" in line
        assert line.endswith("make room.")

    def test_what_is_no_exception_is_told_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(CheckpointException("read", {})) == 1
        assert "loongplug: error [rank 0]: CheckpointException" in capsys.readouterr().err

    def test_exits_keep_their_code(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(SystemExit(2)) == 2
        assert self._end(SystemExit(None)) is None
        assert capsys.readouterr().err == ""
        assert self._end(SystemExit("no data")) == 1
        assert capsys.readouterr().err == "loongplug: error [rank 0]: no data\n"

    def test_interrupts_are_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._end(KeyboardInterrupt()) == 130
        assert capsys.readouterr().err == "loongplug: interrupted\n"
