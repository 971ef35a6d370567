"""Two pytest processes on one folder run each test once, and the module fixtures of their own."""

import os
import subprocess
import sys
from pathlib import Path

FILE = """
import os, time
import pytest

@pytest.fixture(scope="module")
def made():
    say("made")
    yield
    say("gone")

def say(what):
    with open(os.environ["SAID"], "a") as file:
        file.write(f"{what} {os.path.basename(__file__)} {os.getpid()}\\n")

def test_one(made):
    say("one")
    until = time.monotonic() + 120
    while len(processes()) < 2 and time.monotonic() < until:  # both have something to do
        time.sleep(0.01)

def processes():
    with open(os.environ["SAID"]) as file:
        return {line.split()[2] for line in file if line.endswith("\\n")}

def test_two(made):
    say("two")
    assert "4" not in __file__.rpartition("_")[2]
"""


def test_each_file_is_run_by_one_process(tmp_path):
    tests, said = tmp_path / "tests", tmp_path / "said"
    (tmp_path / "shares").mkdir()
    for number in range(8):  # several to a folder: what a folder has up is taken down in time
        folder = tests / f"folder_{number // 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"test_{number}.py").write_text(FILE)
    own = {"PYTHONPATH": str(Path(__file__).parent), "SAID": str(said)}
    environment = {**os.environ, **own, "LOONGPLUG_TEST_SHARES": str(tmp_path / "shares")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "shared_files", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen([*command, str(tests)], env=environment, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    codes = [process.wait(timeout=240) for process in running]
    assert sorted(codes) == [0, 1]  # the file that fails did so once
    lines = [line.split() for line in said.read_text().splitlines()]
    for number in range(8):
        mine = [(what, pid) for what, file, pid in lines if file == f"test_{number}.py"]
        assert [what for what, _ in mine] == ["made", "one", "two", "gone"]
        assert len({pid for _, pid in mine}) == 1
    assert {int(pid) for *_, pid in lines} == {process.pid for process in running}
