"""How forked ranks end, and what is told of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from loongplug.verify.ranks import RankError, run_ranks

pytestmark = pytest.mark.quick


def test_results_come_in_order_and_events_as_they_are_told(tmp_path):
    heard = []

    def work(rank, tell):
        tell(f"rank {rank}")
        return rank, os.environ["RANK"], os.environ["WORLD_SIZE"]

    found = run_ranks(work, 3, folder=tmp_path, on_event=heard.append)
    assert found == [(0, "0", "3"), (1, "1", "3"), (2, "2", "3")]
    assert sorted(heard) == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ValueError("another flag"), ValueError, r"^another flag$"),
        (SystemExit("no such file"), ValueError, r"^no such file$"),
        (KeyError("lost"), RankError, r"(?s)rank 1 failed.*Traceback.*KeyError: 'lost'"),
    ],
)
def test_a_users_error_stays_one_and_another_comes_with_its_traceback(tmp_path, error, kind, told):
    def work(rank, tell):
        if rank == 1:
            raise error
        time.sleep(60)

    with pytest.raises(kind, match=told):
        run_ranks(work, 2, folder=tmp_path, timeout=0.5)


def test_a_rank_that_dies_is_the_cause_of_what_others_say(tmp_path):
    def work(rank, tell):
        if rank == 1:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        raise ConnectionResetError("the peer is gone")

    said = "(?s)rank 1 failed:\nwas killed by signal SIGTERM.*last words"
    with pytest.raises(RankError, match=said):
        run_ranks(work, 2, folder=tmp_path)


def test_ranks_that_hang_are_stopped(tmp_path):
    with pytest.raises(RankError, match=r"(?s)rank 0 failed:.*was stopped"):
        run_ranks(lambda rank, tell: time.sleep(60), 2, folder=tmp_path, timeout=0.2)


def test_without_torch_no_thread_pool_is_made():
    code = (
        "import sys; from loongplug.verify.ranks import own_thread_pool; own_thread_pool(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
