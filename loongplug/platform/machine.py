"""The facts about a machine that ``loongplug doctor`` judges, and what GPUs can do at most."""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import loongplug
from loongplug.platform.torch_kernels import grouped_product, onednn_product, varlen_attention
from loongplug.platform.upstream_flags import is_tested

# What is shown whether or not it is there.
SHOWN_PACKAGES = frozenset(
    ("torch", "megatron-core", "transformers", "transformer-engine", "flash-attn", "triton")
)
# Optional packages that upstream imports when they are installed, by the module that has to work.
OPTIONAL_MODULES = {"transformer-engine": "transformer_engine.pytorch", "flash-attn": "flash_attn"}
# Dense bf16 products of matrices by the data sheets, in TFLOP/s. The first name that is contained
# in a device's counts, so that the more special ones stand first.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 836.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One CUDA device as torch sees it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What a machine has. Packages that are not installed have the version None."""

    system: str
    python: str
    cores: int
    memory_bytes: int
    available_memory_bytes: int
    shared_memory_bytes: int | None  # free in /dev/shm; None where there is none
    has_nvidia_driver: bool
    packages: dict[str, str | None]
    # Installed optional packages that don't import, with the exception's type and text.
    broken: dict[str, tuple[str, str]]
    requirements: tuple[str, ...]  # of loongplug itself, as "megatron-core>=0.19.2,<0.20"
    requires_python: str | None
    upstream_error: str | None  # why Megatron cannot be used with this platform
    # What torch says, where it is installed.
    torch_cuda: str | None = None  # the CUDA version that it was built for
    cuda_usable: bool = False
    gpus: tuple[GpuFacts, ...] = ()
    nccl: str | None = None
    has_gloo: bool = False
    has_varlen: bool = False  # attention within segments of any lengths
    has_grouped: bool = False  # several products at once
    has_onednn: bool = False  # large products on the host


def collect(*, deep: bool = False) -> MachineFacts:
    """Look at this machine. Imports torch; Megatron, which takes longest, where there is need.

    There is with ``deep``, and where the versions of both are not the tested ones.
    """
    requirements, requires_python = _own_requirements()
    names = {*SHOWN_PACKAGES, *(Requirement(text).name for text in requirements)}
    packages = {name: version(name) for name in sorted(names)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = Path("/dev/shm")
    return MachineFacts(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        available_memory_bytes=_available_memory() or memory,
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        packages=packages,
        broken=_broken(packages),
        requirements=requirements,
        requires_python=requires_python,
        upstream_error=_upstream_error(packages, deep=deep),
        **(_seen_by_torch() if packages["torch"] else {}),
    )


def _seen_by_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    usable = torch.cuda.is_available()
    seen = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if usable else 0))
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "torch_cuda": torch.version.cuda,
        "cuda_usable": usable,
        "gpus": tuple(
            GpuFacts(
                name=gpu.name, memory_bytes=gpu.total_memory, capability=(gpu.major, gpu.minor)
            )
            for gpu in seen
        ),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "has_gloo": dist.is_available() and dist.is_gloo_available(),
        "has_varlen": usable and varlen_attention() is not None,  # on GPUs alone; slow to import
        "has_grouped": grouped_product() is not None,
        "has_onednn": onednn_product() is not None,
    }


def peak_tflops(device: str) -> float | None:
    """The peak of a device of this name; None for one that is not known.

    >>> peak_tflops("NVIDIA H100 80GB HBM3")
    989.0
    """
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def version(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_requirements() -> tuple[tuple[str, ...], str | None]:
    """What loongplug needs: from its installed metadata, or from the checkout it is run from."""
    try:
        metadata = importlib.metadata.metadata("loongplug")
    except importlib.metadata.PackageNotFoundError:
        path = Path(loongplug.__file__).parents[1] / "pyproject.toml"
        if not path.exists():
            return (), None
        project = tomllib.loads(path.read_text())["project"]
        return tuple(project["dependencies"]), project["requires-python"]
    needed = [text for text in metadata.get_all("Requires-Dist") or [] if "extra ==" not in text]
    return tuple(needed), metadata["Requires-Python"]


def _broken(packages: dict[str, str | None]) -> dict[str, tuple[str, str]]:
    found = {}
    for package, module in OPTIONAL_MODULES.items():
        if packages[package] is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever it is, upstream meets it too
            found[package] = (type(error).__name__, _one_line(error))
    return found


def _upstream_error(packages: dict[str, str | None], *, deep: bool) -> str | None:
    """Import Megatron and put every replacement in place, as a training run does; then undo."""
    if packages["torch"] is None or packages["megatron-core"] is None:
        return None
    if not deep and is_tested("megatron-core", "torch"):
        return None
    from loongplug.platform import activate

    active = activate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from loongplug.platform.upstream import apply_upstream_replacements

            apply_upstream_replacements(active)
    except Exception as error:  # whatever it is, a training run meets it too
        return f"{type(error).__name__}: {_one_line(error)}"
    finally:
        active.deactivate()
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _available_memory() -> int | None:
    """What Linux says is left; None elsewhere."""
    meminfo = Path("/proc/meminfo")
    text = meminfo.read_text() if meminfo.exists() else ""
    available = re.search(r"^MemAvailable:\s+(\d+)", text, re.MULTILINE)
    return int(available[1]) * 1024 if available else None
