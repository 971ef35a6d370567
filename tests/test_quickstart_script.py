"""The quickstart keeps the run before. That training learns is asserted by ``.ci/run``."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "quickstart.sh"


@pytest.mark.quick
def test_the_run_before_is_kept(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")  # nothing else of the project is there
    environment = f"ROOT={tmp_path}\nloongplug_environment() {{ :; }}\n"
    (tmp_path / "scripts" / "venv.sh").write_text(environment)
    mine = tmp_path / "runs" / "quickstart" / "hf" / "README.md"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    command = ["bash", "scripts/quickstart.sh"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ, timeout=120, capture_output=True, text=True
    )
    assert ended.returncode != 0  # there is nothing here that makes the demo's data
    assert "1/4 demo data" in ended.stdout
    (kept,) = tmp_path.glob("runs/quickstart.*")
    assert f"kept in runs/{kept.name}" in ended.stdout
    assert (kept / "hf" / "README.md").read_text() == "mine"
    assert not [*(tmp_path / "runs" / "quickstart").iterdir()]
