"""Kernels that not every torch has, and what they ask for; ``loongplug doctor`` names each.

The functions import torch themselves, so that doctor can say that there is none.
"""

import inspect
from collections.abc import Callable
from typing import Any

CAPABILITY = (8, 0)  # of the first GPUs with such kernels, and with bf16 at speed
# Attention: a head's channels are a multiple of the one, and no more than the other.
HEAD_ALIGNMENT, WIDEST_HEAD = 8, 256
# Several products at once: bf16 values in the 16 bytes that a row of each operand is a multiple of.
GROUPED_ALIGNMENT = 8
_ASKED = ("scale", "window_size", "enable_gqa")  # that the first versions did not have


def varlen_attention() -> Callable[..., Any] | None:
    """``torch.nn.attention.varlen.varlen_attn``; None where torch has none, or an older one.

    None as well where the current GPU is too old for its kernels.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if all(name in has for name in _ASKED) else None


def grouped_product() -> Callable[..., Any] | None:
    """``torch.nn.functional.grouped_mm``, in torch from 2.10 on; None in one without."""
    import torch.nn.functional as F

    return getattr(F, "grouped_mm", None)


def onednn_product() -> Callable[..., Any] | None:
    """oneDNN's linear in float32, [m, k] by [n, k] and a bias; None where torch has none.

    None as well where torch has no MKL: only against MKL is oneDNN known to be faster.
    """
    import torch

    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return None
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
