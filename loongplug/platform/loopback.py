"""A loopback address for the ranks of one machine that were started together.

gloo accepts any process that connects to its port as the peer that it waits for. A rank whose peer
has died goes on connecting to that peer's port, which another run may have by then.
"""

import sys
import zlib

OWN_ADDRESS = "LOONGPLUG_GLOO_ADDRESS"  # in the environment of a rank


def own_address(run: str) -> dict[str, str]:
    """The environment that tells the ranks of a ``run`` its address; empty where not on Linux."""
    if sys.platform != "linux":
        return {}
    # Two runs at the same time almost never get the same number.
    number = zlib.crc32(run.encode()) % (2**24 - 2) + 1
    return {OWN_ADDRESS: f"127.{number >> 16}.{number >> 8 & 255}.{number & 255}"}
