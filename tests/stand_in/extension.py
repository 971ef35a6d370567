"""Build the device once for each source and torch, and load it into this process."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

NAME = "stand_in"
SOURCE = Path(__file__).parent / "source"
# No debug information: it takes most of the compiler's time.
FLAGS = ("-O1", "-g0", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")


def reason_without() -> str | None:
    """Why the device cannot be had here, as one sentence; None where it can."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "the stand-in device is built by a C++ compiler (g++), and none is here"
    if shutil.which("ninja") is None:
        return "the stand-in device is built by ninja, and it is not here"
    return None


def build() -> Path:
    """The extension's file; built where it is not there, by one process for all."""
    folder = _cache() / _digest()
    target = folder / f"{NAME}.so"
    with _locked(folder.with_suffix(".lock")):
        if not target.is_file():
            with tempfile.TemporaryDirectory(dir=folder.parent) as place:
                made = Path(place)
                _compile(made)
                folder.mkdir(exist_ok=True)
                (made / f"{NAME}.so").rename(target)
    return target


@cache
def load() -> ModuleType:
    """The device's functions; from now on torch knows it in this process, as ``stand_in``."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(module))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _device_module(extension: ModuleType) -> ModuleType:
    """What torch looks for as ``torch.stand_in``."""
    made = ModuleType(f"torch.{NAME}")
    vars(made).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        current_device=extension.current_device,
        set_device=extension.set_device,
        device_count=lambda: extension.DEVICES,
        synchronize=lambda device=None: extension.synchronize(-1),
        manual_seed_all=lambda seed: None,  # the host's generator is its own
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    return made


def _compile(folder: Path) -> None:
    """In a process of its own, which prints errors: what builds an extension also loads it."""
    source = str(SOURCE / "stand_in.cpp")
    subprocess.run([sys.executable, "-c", _COMPILER, source, str(folder), *FLAGS], check=True)


_COMPILER = f"""
import sys
from torch.utils import cpp_extension
source, folder, *flags = sys.argv[1:]
cpp_extension.load("{NAME}", [source], extra_cflags=flags, build_directory=folder,
                   is_python_module=False, keep_intermediates=True)
"""


def _digest() -> str:
    content = hashlib.sha256(torch.__version__.encode() + " ".join(FLAGS).encode())
    for file in sorted(SOURCE.iterdir()):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "loongplug-tests" / NAME
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time; a process that dies lets go."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
