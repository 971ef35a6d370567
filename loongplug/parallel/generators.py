"""The default generators of host and device: taken, put back, and parted from each other."""

from typing import Any

import torch

from loongplug.platform import current_platform


def take_generators() -> tuple[Any, ...]:
    """What :func:`put_generators` takes.

    The host's state is copied. A device's is handed over as the object that its generator works
    on, so that neither taking nor putting waits for the device or copies.
    """
    host = torch.default_generator.get_state()  # [5056] uint8
    if current_platform().name != "cuda":
        return (host,)
    return (host, _device_generator().graphsafe_get_state())


def put_generators(taken: tuple[Any, ...]) -> None:
    """Go on where the generators were when ``taken`` was taken, or last put and used since."""
    torch.default_generator.set_state(taken[0])
    if len(taken) > 1:
        _device_generator().graphsafe_set_state(taken[1])


def part_generators() -> None:
    """Go on with the same numbers, but leave what was taken before as it is."""
    if current_platform().name == "cuda":
        generator = _device_generator()
        generator.graphsafe_set_state(generator.clone_state())


def _device_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]
