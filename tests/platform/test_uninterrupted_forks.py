"""Signals wait for the end of a fork, whatever they do where nobody handles them."""

import signal
import subprocess
import sys

import pytest

from loongplug.platform.uninterrupted_forks import signals_wait


@pytest.mark.quick
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_ends_the_process_waits(name: str) -> None:
    script = f"""
import signal
from loongplug.platform.uninterrupted_forks import signals_wait
signal.signal(signal.{name}, signal.SIG_DFL)
with signals_wait():
    signal.raise_signal(signal.{name})
    print("forked", flush=True)
print("never", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.Signals[name], b"forked\n")


@pytest.mark.quick
def test_what_is_ignored_stays_so_for_programs_that_are_started() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_wait():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
