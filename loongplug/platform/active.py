"""The one platform of this process, asked for everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from loongplug.platform.platforms import Platform

DeviceName = Literal["cpu", "cuda"]


class Process:
    """Holds the process's platform; the only state of this module."""

    platform: Platform | None = None


def current_platform() -> Platform:
    """The active platform. Raises RuntimeError when ``activate`` has not been called."""
    if Process.platform is None:
        raise RuntimeError("no platform is active; call loongplug.platform.activate() first")
    return Process.platform


def is_host() -> bool:
    """Whether work is done on the host: the active platform's device, or none is active yet."""
    return Process.platform is None or Process.platform.name == "cpu"
