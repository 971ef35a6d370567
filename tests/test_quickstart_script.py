"""The quickstart keeps the run before, with whatever was put into its folder."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "quickstart.sh"


def test_the_run_before_is_kept(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "scripts" / "venv.sh").write_text(
        f"ROOT={tmp_path}\nloongplug_environment() {{ :; }}\n"
    )
    mine = tmp_path / "runs" / "quickstart" / "hf" / "README.md"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    ended = subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        cwd=tmp_path,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0  # there is nothing here that makes the demo's data
    assert "1/4 demo data" in ended.stdout
    (kept,) = tmp_path.glob("runs/quickstart.*")
    assert f"kept in runs/{kept.name}" in ended.stdout
    assert (kept / "hf" / "README.md").read_text() == "mine"
    assert not [*(tmp_path / "runs" / "quickstart").iterdir()]
