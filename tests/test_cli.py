"""The ``loongplug`` command: what reaches the functions behind it, and how it ends."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data.data_options import PixelLimits, RowAccess

pytestmark = pytest.mark.quick


class _Calls(list[tuple[tuple[Any, ...], dict[str, Any]]]):
    def __call__(self, *args: Any, **kwargs: Any) -> int:
        self.append((args, kwargs))
        return 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    """Every implementation replaced by one that notes its arguments."""
    noted = _Calls()
    for target in (
        "loongplug.evaluate.command.evaluate",
        "loongplug.bench.step.bench_step",
        "loongplug.platform.doctor.doctor",
    ):
        monkeypatch.setattr(target, noted)
    return noted


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_importing_the_command_is_fast() -> None:
    code = (
        "import sys, loongplug.cli, loongplug.training.own_flags; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_eval_options(calls: _Calls) -> None:
    options = (
        "--media-root m --confine-media --batch-size 2 --max-new-tokens 3 --limit 4 --device cpu"
        " --metric number --tolerance 0.1 --trusted-packages p --predictions r --json j"
        " --max-pixels 9 --video-min-pixels 8 --transparency drop"
    )
    assert _run("eval", "--model", "hf", "--data", "d", *options.split())[0] == 0
    assert calls[0][1] == {
        "access": RowAccess(media_root="m", confine_media=True),
        "batch_size": 2,
        "max_new_tokens": 3,
        "limit": 4,
        "special_tokens_in_text": False,
        "pixel_limits": PixelLimits(max_pixels=9, video_min_pixels=8),
        "transparency": "drop",
        "device": "cpu",
        "metric": "number",
        "tolerance": 0.1,
        "trusted_packages": ["p"],
        "predictions": Path("r"),
        "json_path": Path("j"),
    }


def test_bench_step_hands_training_flags_on(calls: _Calls) -> None:
    given = ["--model-name", "qwen3_vl_tiny", "--bf16", "model.image_encoder.freeze=true"]
    assert _run("bench", "step", "--ranks", "2", "--steps", "5", *given)[0] == 0
    (flags,), options = calls[0]
    assert flags == given
    assert options == {"ranks": 2, "warmup": 3, "steps": 5, "json_path": None}


def test_doctor(calls: _Calls) -> None:
    assert _run("doctor", "--device", "cpu", "--json")[0] == 0
    assert calls[0][1] == {"device": "cpu", "as_json": True, "deep": False}


def test_doctor_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loongplug.platform.doctor.doctor", lambda **_: 1)
    assert _run("doctor")[0] == 1


def test_doctor_refuses_unknown_devices() -> None:
    code, printed = _run("doctor", "--device", "tpu")
    assert code == 1
    assert printed.strip() == (
        "loongplug: error: --device 'tpu' is unknown: expected auto, cpu or cuda."
    )


def test_the_package_says_where_it_is_found() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Releases"] == f"https://pypi.org/project/{project['name']}/"


def test_version_by_both_entries() -> None:
    git = ("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD")
    head = subprocess.check_output(git, text=True).strip()
    code, expected = _run("--version")
    begin = f"loongplug {importlib.metadata.version('loongplug')} ({head}"
    assert (code, expected in (f"{begin})\n", f"{begin}-dirty)\n")) == (0, True), expected
    command = [sys.executable, "-m", "loongplug", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == expected


@pytest.mark.parametrize(
    ("given", "ranks", "handed_on"),
    [
        (("--ranks", "2", "--bf16", "model.x=true"), 2, ["--bf16", "model.x=true"]),
        (("--device", "cpu"), 1, ["--device", "cpu"]),
        (("--help-all",), None, ["--help-all"]),  # all of the help is the run's
    ],
)
def test_train_becomes_torchrun_with_its_flags(
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    ranks: int | None,
    handed_on: list[str],
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    _run("train", *given)
    torchrun = ["-m", "loongplug.parallel.launch", "--standalone", f"--nproc-per-node={ranks}"]
    before = [] if ranks is None else torchrun
    assert started[0][1:] == [*before, "-m", "loongplug.train", *handed_on]


def test_a_working_directory_that_is_gone_is_said_before_libraries_fail(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); import loongplug"
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "loongplug: error: the working directory is gone: cd to another one\n"
