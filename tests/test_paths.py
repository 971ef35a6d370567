"""Where configs are found: beside a checkout's package, inside an installed one."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from loongplug.paths import configs_dir
from loongplug.training.config import available_models

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.quick
def test_checkout_has_its_configs_beside_the_package() -> None:
    assert configs_dir() == ROOT / "configs"
    assert (configs_dir() / "models" / "qwen3_vl" / "qwen3_vl_tiny.yaml").is_file()


@pytest.mark.quick
def test_installed_package_has_them_inside_and_prefers_those(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "loongplug"
    (package / "configs" / "models").mkdir(parents=True)
    # Some other distribution's folder beside the package.
    (package.parent / "configs" / "models").mkdir(parents=True)
    assert configs_dir(package=package) == package / "configs"


@pytest.mark.quick
def test_folder_without_models_does_not_count(tmp_path: Path) -> None:
    package = tmp_path / "loongplug"
    (package / "configs").mkdir(parents=True)
    (tmp_path / "configs" / "models").mkdir(parents=True)
    assert configs_dir(package=package) == tmp_path / "configs"


@pytest.mark.quick
def test_missing_configs_are_an_error_that_names_both_places(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        configs_dir(package=tmp_path / "loongplug")
    assert str(tmp_path / "loongplug" / "configs") in str(caught.value)
    assert str(tmp_path / "configs") in str(caught.value)


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
