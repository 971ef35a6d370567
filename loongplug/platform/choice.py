"""The choice of a platform: by the flag ``--device``, or by what the machine has.

Importing this imports no torch: what starts the ranks reads the flag, too.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loongplug.platform.active import DeviceName, Process

if TYPE_CHECKING:
    from loongplug.platform.platforms import Platform

PLATFORM_NAMES = ("auto", "cpu", "cuda")


def activate(name: str = "auto") -> "Platform":
    """Choose the process's platform, before the first ``import megatron``.

    ``"auto"`` takes CUDA where ``torch.cuda.is_available()``, and the CPU elsewhere; it keeps
    a platform that is already active. This applies the platform's table of replacements.

    Raises ValueError for an unknown name, for ``"cuda"`` without a usable GPU, and when
    another platform is active already.
    """
    _require_known(name)
    active = Process.platform
    if active is not None:
        if name in ("auto", active.name):
            return active
        raise ValueError(
            f"this process runs on {active.name!r} already and cannot change to {name!r}; "
            "call current_platform().deactivate() first"
        )
    # Upstream imports torch's compiler of extensions, which warns where there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Here and not above, so that this file stays free of torch.
    from loongplug.platform.platforms import CpuPlatform, Platform

    Process.platform = Platform() if choose_device(name) == "cuda" else CpuPlatform()
    return Process.platform


def choose_device(name: str = "auto") -> DeviceName:
    """The device that ``name`` stands for, without activating a platform.

    ``"auto"`` takes CUDA where ``torch.cuda.is_available()``, and the CPU elsewhere.

    Raises ValueError for an unknown name, and for ``"cuda"`` without a usable GPU.
    """
    _require_known(name)
    import torch

    usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        raise ValueError(
            "device 'cuda' was asked for, but torch sees no usable CUDA GPU here "
            "(torch.cuda.is_available() is False); use --device cpu, or --device auto"
        )
    return "cuda" if name == "cuda" or (name == "auto" and usable) else "cpu"


def _require_known(name: str) -> None:
    if name not in PLATFORM_NAMES:
        raise ValueError(f"device {name!r} is unknown; expected one of {', '.join(PLATFORM_NAMES)}")


def add_device_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``--device`` to a parser, or to a group of its flags."""
    parser.add_argument(
        "--device", choices=PLATFORM_NAMES, default="auto", help="auto: CUDA if there is a GPU"
    )


def requested_device(flags: Sequence[str]) -> str:
    """The device that ``--device`` names in ``flags``, whatever else is there; the last one counts.

    Raises:
        ValueError: it names no device.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_device_flag(parser)
    try:
        device: str = parser.parse_known_args(flags)[0].device
    except argparse.ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from error
    return device
