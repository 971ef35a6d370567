"""The quickstart's commands, without what they do; the run before is kept.

That training learns what it should is asserted of a real run by ``.ci/run``.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "quickstart.sh"
DATA = "runs/quickstart/data"

# Notes its name and arguments as a line of JSON. The demo's data become one row for each file.
STAND_IN = """#!/bin/bash
printf '["%s"' "${0##*/}" >> "$CALLS"
printf ', "%s"' "$@" >> "$CALLS"
echo "]" >> "$CALLS"
[[ "$*" == *make_demo_data.py* ]] || exit 0
new=
[[ "$*" == *--new-questions* ]] && new=new_
mkdir -p runs/quickstart/data
for split in train test; do
    echo "a ${new}$split row" > "runs/quickstart/data/$new$split.jsonl"
done
"""


def checkout(folder: Path) -> Path:
    """The script where nothing else of the project is."""
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / "scripts" / "venv.sh").write_text(
        f"ROOT={folder}\nloongplug_environment() {{ :; }}\n"
    )
    return folder


def start(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        cwd=folder,
        env={**os.environ, **environment},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )


def values(call: list[str], flag: str) -> list[str]:
    """What stands behind ``flag``, up to the next one; of several, the last counts."""
    at = len(call) - call[::-1].index(flag)
    behind = [*call[at:], "--"]
    return behind[: next(i for i, word in enumerate(behind) if word.startswith("--"))]


def test_the_run_before_is_kept(tmp_path: Path) -> None:
    checkout(tmp_path)
    mine = tmp_path / "runs" / "quickstart" / "hf" / "README.md"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    ended = start(tmp_path)
    assert ended.returncode != 0  # there is nothing here that makes the demo's data
    assert "1/4 demo data" in ended.stdout
    (kept,) = tmp_path.glob("runs/quickstart.*")
    assert f"kept in runs/{kept.name}" in ended.stdout
    assert (kept / "hf" / "README.md").read_text() == "mine"
    assert not [*(tmp_path / "runs" / "quickstart").iterdir()]


def test_the_second_phase_teaches_what_the_first_has_not_asked(tmp_path: Path) -> None:
    checkout(tmp_path)
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name in ("python", "loongplug"):
        (stand_ins / name).write_text(STAND_IN)
        (stand_ins / name).chmod(0o755)
    (tmp_path / "runs").mkdir()
    calls = tmp_path / "calls"
    start(tmp_path, PATH=f"{stand_ins}:{os.environ['PATH']}", CALLS=str(calls))
    *_, first, second, evaluation = (json.loads(line) for line in calls.read_text().splitlines())
    assert values(first, "--train-data-path") == [f"{DATA}/train.jsonl"]
    assert values(first, "--valid-data-path") == [f"{DATA}/test.jsonl"]
    old_share, old, new_share, new = values(second, "--train-data-path")
    assert (old, new) == (f"{DATA}/train.jsonl", f"{DATA}/new_train.jsonl")
    assert float(old_share) + float(new_share) == pytest.approx(1)
    assert values(second, "--valid-data-path") == [f"{DATA}/test.jsonl", f"{DATA}/new_test.jsonl"]
    assert values(second, "--load") == values(first, "--save")
    assert "model.image_encoder.freeze=True" in second
    (held_out,) = values(evaluation, "--data")
    assert (tmp_path / held_out).read_text() == "a test row\na new_test row\n"
