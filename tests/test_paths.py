"""Where configs are found: beside a checkout's package, inside an installed one."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from loongplug.training.config import available_models
from loongplug.training.model_files import own_folder

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.quick
@pytest.mark.parametrize("inside", [True, False])
def test_an_installed_package_has_them_inside_and_a_checkout_beside(
    tmp_path: Path, inside: bool
) -> None:
    package = tmp_path / "loongplug"
    beside = tmp_path / "configs" / "models"  # of an installed one, another distribution's
    own = package / "configs" / "models" if inside else beside
    for folder in (beside, own):
        folder.mkdir(parents=True, exist_ok=True)
    assert own_folder(package=package) == own


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed"
)
def test_wheel_carries_the_configs_and_finds_them(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from loongplug.training.config import available_models as a; print(*a().values())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    ).stdout.split()
    commands = (
        (sys.executable, "-c", "from loongplug.cli import commit; print(commit())"),
        ("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
    )
    said, head = (
        subprocess.check_output(each, cwd=tmp_path / "site", text=True, timeout=60).strip()
        for each in commands
    )
    assert said in (head, f"{head}-dirty")
    here = {model.name for model in available_models().values()}
    assert {Path(path).name for path in found} == here
    assert all(Path(path).is_relative_to(tmp_path / "site") for path in found)
