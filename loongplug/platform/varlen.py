"""Torch's attention within segments of any lengths, where it has what is asked of it."""

import inspect
from collections.abc import Callable
from typing import Any

_ASKED = ("scale", "window_size", "enable_gqa")  # that the first versions did not have


def varlen_attention() -> Callable[..., Any] | None:
    """``torch.nn.attention.varlen.varlen_attn``; None where torch has none, or an older one."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if all(name in has for name in _ASKED) else None
