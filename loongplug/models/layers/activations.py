"""Activation functions by transformers' names for them."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from torch import Tensor
from torch.nn import functional as F

_KNOWN: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "quick_gelu": quick_gelu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    }
)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that ``transformers`` calls ``name``.

    Raises:
        ValueError: it is not one of those here.
    """
    if name not in _KNOWN:
        raise ValueError(
            f"activation is {name!r}, and known are {', '.join(_KNOWN)}: take one of them."
        )
    return _KNOWN[name]
