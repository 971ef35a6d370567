"""Torch's attention within segments of any lengths, where it has what is asked of it."""

import inspect
from collections.abc import Callable
from typing import Any

# Of a head's channels: a multiple of the one, and no more than the other.
ALIGNMENT, WIDEST = 8, 256
_CAPABILITY = (8, 0)  # from which on GPUs have such kernels
_ASKED = ("scale", "window_size", "enable_gqa")  # that the first versions did not have


def varlen_attention() -> Callable[..., Any] | None:
    """``torch.nn.attention.varlen.varlen_attn``; None where torch has none, or an older one.

    None as well where the current GPU is too old for its kernels.
    """
    # Here and not above, so that loongplug doctor can say that there is no torch.
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if all(name in has for name in _ASKED) else None
