"""What torch's kernels for attention within segments and for grouped products ask for."""

import inspect
from collections.abc import Callable
from typing import Any

CAPABILITY = (8, 0)  # of the first GPUs with such kernels, and with bf16 at speed
# Attention: a head's channels are a multiple of the one, and no more than the other.
HEAD_ALIGNMENT, WIDEST_HEAD = 8, 256
# Several products at once (``grouped_mm``): bf16 values in the 16 bytes that a row of each operand
# is a multiple of, and the first torch that has it.
GROUPED_ALIGNMENT, GROUPED_SINCE = 8, "2.10"
_ASKED = ("scale", "window_size", "enable_gqa")  # that the first versions did not have


def varlen_attention() -> Callable[..., Any] | None:
    """``torch.nn.attention.varlen.varlen_attn``; None where torch has none, or an older one.

    None as well where the current GPU is too old for its kernels.
    """
    # Here and not above, so that loongplug doctor can say that there is no torch.
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if all(name in has for name in _ASKED) else None
