"""What a run stands on: CPU with gloo, or CUDA with NCCL, behind one small interface.

Here live the choice of the platform, the CPU layer's table of replaced ``torch`` names, the
table of replaced Megatron functions, the mechanism both tables share, and ``doctor``, which
tells what a machine has. Nothing here knows about models, data or training, and nothing
outside this folder may ask ``torch.cuda.is_available()`` to decide what to do.
"""

from loongplug.platform.active import DeviceName, current_platform
from loongplug.platform.choice import activate, choose_device, requested_device

__all__ = [
    "DeviceName",
    "activate",
    "choose_device",
    "current_platform",
    "requested_device",
]
