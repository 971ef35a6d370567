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


def test_what_a_rank_prints_is_kept(tmp_path):
    run_ranks(lambda rank, tell: print("said"), 1, folder=tmp_path)
    assert (tmp_path / "rank_0.log").read_text() == "said\n"


def test_a_users_error_stays_one(tmp_path):
    def work(rank, tell):
        if rank == 1:
            raise ValueError("give another flag")
        time.sleep(60)

    with pytest.raises(ValueError, match=r"^give another flag$"):
        run_ranks(work, 2, folder=tmp_path, timeout=0.5)


def test_another_error_comes_with_its_traceback(tmp_path):
    def work(rank, tell):
        raise KeyError("lost")

    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*Traceback.*KeyError: 'lost'"):
        run_ranks(work, 1, folder=tmp_path)


def test_a_rank_that_dies_is_told_with_its_last_words(tmp_path):
    def work(rank, tell):
        print("last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RankError, match=r"(?s)rank 0 ended with code -15.*last words"):
        run_ranks(work, 1, folder=tmp_path)


def test_a_rank_that_dies_is_the_cause_of_what_others_say(tmp_path):
    def work(rank, tell):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        raise ConnectionResetError("the peer is gone")

    with pytest.raises(RankError, match="rank 1 ended with code -15"):
        run_ranks(work, 2, folder=tmp_path)


def test_ranks_that_hang_are_stopped(tmp_path):
    with pytest.raises(RankError, match="rank 0 was stopped"):
        run_ranks(lambda rank, tell: time.sleep(60), 2, folder=tmp_path, timeout=0.2)


def test_an_exit_with_a_message_is_the_users(tmp_path):
    def work(rank, tell):
        raise SystemExit("no such file")

    with pytest.raises(ValueError, match="no such file"):
        run_ranks(work, 1, folder=tmp_path)


def test_without_torch_no_thread_pool_is_made():
    code = (
        "import sys; from loongplug.verify.ranks import own_thread_pool; own_thread_pool(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
