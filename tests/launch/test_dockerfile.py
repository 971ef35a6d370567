"""The image is built by the README's steps, for a user without rights. It is not built here."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()


def arguments(instruction: str) -> list[str]:
    start = f"{instruction} "
    return [" ".join(line.split()[1:]) for line in LINES if line.startswith(start)]


def readme_s_install() -> list[str]:
    text = (ROOT / "README.md").read_text().split("\n## Install\n")[1]
    block = text.split("```bash\n")[1].split("```")[0]
    return [line.split("  #")[0].strip() for line in block.splitlines()]


def test_its_steps_are_the_readme_s() -> None:
    *steps, doctor = readme_s_install()
    assert [step for step in arguments("RUN") if step.startswith("pip ")] == steps
    assert doctor == "loongplug doctor"
    assert arguments("CMD") == ['["loongplug", "doctor"]']


def test_what_is_built_without_isolation_has_what_it_is_built_with() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    *_, tools, last, _ = readme_s_install()
    assert "--no-build-isolation" in last
    assert {Requirement(each).name for each in build["requires"]} <= {*tools.split()}


def test_python_is_recent_enough_and_its_environment_is_first_on_path() -> None:
    (base,) = arguments("FROM")
    assert re.fullmatch(r"nvidia/cuda:13\.[\d.]+-cudnn-devel-ubuntu24\.04", base)  # Python 3.12
    if (built_for := torch.version.cuda) is not None:  # what extensions for this torch ask of nvcc
        assert base.startswith(f"nvidia/cuda:{built_for.split('.')[0]}.")
    assert "python3 -m venv /opt/venv" in arguments("RUN")
    assert any(line.startswith("PATH=/opt/venv/bin:$PATH") for line in arguments("ENV"))


def test_it_runs_without_rights_where_the_manifest_looks() -> None:
    job = yaml.safe_load((ROOT / "scripts" / "launch" / "kubernetes.yaml").read_text())
    assert arguments("USER") == ["10001"]
    assert any("useradd" in step and "--uid 10001" in step for step in arguments("RUN"))
    (folder,) = arguments("WORKDIR")
    assert job["spec"]["trainer"]["command"] == [f"{folder}/scripts/sft.sh"]
    assert f"fsGroup: {arguments('USER')[0]}" in yaml.safe_dump(job)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert job["spec"]["trainer"]["image"].endswith(f"/loongplug:{project['version']}")


def test_what_is_no_part_of_the_project_stays_out() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= {*ignored}
    assert arguments("COPY") == [". ."]
