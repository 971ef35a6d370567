"""The scripts' environment: installed once, and not again for less than it has."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "venv.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment's Python only notes what it is asked for."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    return tmp_path


def enter(checkout: Path, extras: str) -> bool:
    """Ask for the environment; whether that installed something. It is first on PATH after."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    command = f"set -euo pipefail; source scripts/venv.sh; loongplug_environment {extras}; "
    which = subprocess.run(
        ["bash", "-c", command + "command -v python"],
        cwd=checkout,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    ).stdout.splitlines()[-1]
    assert which == str(checkout / ".venv" / "bin" / "python")
    if calls.exists():
        assert calls.read_text().strip().endswith(f"-e {checkout}[{extras}]")
    return calls.exists()


@pytest.mark.parametrize(
    ("first", "then", "again"),
    [
        *(("dev", "dev", False), ("dev", "test", False), ("test", "demo", False)),
        *(("demo", "test", True), ("test", "dev", True), ("dev", "gpu", True)),
    ],
)
def test_more_serves_for_less(checkout: Path, first: str, then: str, again: bool) -> None:
    assert enter(checkout, first)
    assert enter(checkout, then) is again
    assert not enter(checkout, then)


def test_a_changed_pyproject_is_installed_anew(checkout: Path) -> None:
    assert enter(checkout, "test")
    (checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert enter(checkout, "demo")
    assert not enter(checkout, "demo")
