"""A loopback address for the ranks of one machine that were started together.

gloo takes whoever connects to a port for the peer that it waits for, and a rank whose peer has died
goes on connecting to a port that may be another run's by then.
"""

import sys
import zlib

OWN_ADDRESS = "LOONGPLUG_GLOO_ADDRESS"  # in the environment of a rank


def own_address(run: str) -> dict[str, str]:
    """The environment that tells ranks of a ``run`` where they meet; only Linux has such places."""
    if sys.platform != "linux":
        return {}
    # As good as no two runs that are there at once have the same.
    number = zlib.crc32(run.encode()) % (2**24 - 2) + 1
    return {OWN_ADDRESS: f"127.{number >> 16}.{number >> 8 & 255}.{number & 255}"}
