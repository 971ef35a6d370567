"""The platform is chosen once, by the flag or by what the machine has."""

import subprocess
import sys
import textwrap

import pytest
import torch

from loongplug.platform import (
    activate,
    active,
    choose_device,
    current_platform,
    platforms,
    requested_device,
)
from loongplug.platform.platforms import CpuPlatform, Platform

pytestmark = pytest.mark.quick


@pytest.fixture
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a platform, as far as ``activate`` can tell."""
    monkeypatch.setattr(active.Process, "platform", None)


def test_another_platform_is_refused() -> None:
    platform = current_platform()
    assert activate("cpu") is activate() is platform
    with pytest.raises(ValueError, match=r"runs on 'cpu' already .*'cuda'.*deactivate"):
        activate("cuda")
    with pytest.raises(ValueError, match=r"'gpu' is unknown; expected one of auto, cpu, cuda"):
        activate("gpu")


def test_cuda_without_a_gpu(nothing_active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no usable CUDA GPU .* use --device cpu"):
        activate("cuda")
    with pytest.raises(RuntimeError, match=r"activate\(\) first"):
        current_platform()


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_cuda_is_taken_where_it_is_and_changes_nothing(
    name: str, nothing_active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {**vars(torch.cuda), **vars(torch), **vars(torch.Tensor)}
    platform = activate(name)
    assert type(platform) is Platform
    assert (platform.name, platform.backend) == ("cuda", "nccl")
    assert {**vars(torch.cuda), **vars(torch), **vars(torch.Tensor)} == before
    platform.deactivate()
    with pytest.raises(RuntimeError):
        current_platform()


def test_auto_is_the_cpu_without_a_gpu(
    nothing_active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(platforms, "CPU_ROWS", ())  # the real table is in use here
    assert isinstance(activate("auto"), CpuPlatform)


def test_a_device_is_chosen_without_activating_anything(
    nothing_active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(name) for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    with pytest.raises(RuntimeError):
        current_platform()


def test_device_is_read_ahead_of_all_else() -> None:
    assert requested_device([]) == "auto"
    assert requested_device(["--foo", "1", "--device", "cpu", "a.b=c"]) == "cpu"
    assert requested_device(["--device=cuda", "--save", "x", "--device", "cpu"]) == "cpu"
    with pytest.raises(ValueError, match=r"^--device: invalid choice: 'tpu'"):
        requested_device(["--device", "tpu"])


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=200)


def test_importing_the_package_imports_no_torch() -> None:
    code = """
        import sys
        import loongplug
        import loongplug.platform
        sys.exit("torch" in sys.modules)
    """
    _run(code)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    code = """
        import torch
        before = dict(vars(torch.cuda))
        from loongplug.platform import activate
        from loongplug.platform.upstream import apply_upstream_replacements
        platform = activate()
        assert platform.name == "cuda" and platform.device.type == "cuda"
        platform.reset_peak_memory()
        block = torch.ones(1 << 20, device=platform.device)
        torch.cuda.synchronize()
        assert platform.peak_memory_bytes() >= 4 << 20
        apply_upstream_replacements(platform)
        changed = [n for n, v in before.items() if vars(torch.cuda)[n] is not v]
        assert not [n for n in changed if callable(before[n])], changed
    """
    _run(code)
