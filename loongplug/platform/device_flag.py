"""The flag ``--device``, which is read before the platform's modules may be imported.

It imports no torch: what starts the ranks reads the flag, too.
"""

import argparse
from collections.abc import Sequence

from loongplug.platform.active import PLATFORM_NAMES


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
