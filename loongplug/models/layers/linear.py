"""Megatron's parallel linears, without the machinery of parallelism where a rank is alone."""

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class LocalColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that is a plain linear in a tensor-parallel group of one.

    Upstream's Python autograd functions order communication against computation; with nothing
    to communicate, torch's own linear gives the same numbers for less, and takes the bias into
    the same kernel. So a bias that upstream would hand back to be added (``skip_bias_add``) is
    already in the output then, and None comes back in its place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A fused bias and activation wants the bias apart.
        apart = self.skip_bias_add and getattr(self.config, "bias_activation_fusion", False)
        self.plain = _is_alone(self) and not apart and not self.config.defer_embedding_wgrad_compute

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, in] -> [s, b, out / tp] and the bias that is left to add, or None."""
        if not self.plain:
            return super().forward(input_, weight, runtime_gather_output)
        return self._plain_product(input_, self.weight if weight is None else weight), None

    def _plain_product(self, input_: Tensor, weight: Tensor) -> Tensor:
        return F.linear(input_, weight, self.bias)


class LocalRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that is a plain linear in a tensor-parallel group of one.

    See :class:`LocalColumnParallelLinear`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain = _is_alone(self)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, in / tp] -> [s, b, out] and the bias that is left to add, or None."""
        if not self.plain:
            return super().forward(input_)
        return self._plain_product(input_, self.weight), None

    def _plain_product(self, input_: Tensor, weight: Tensor) -> Tensor:
        return F.linear(input_, weight, self.bias)


def _is_alone(linear: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether nothing but the product is asked of ``linear``."""
    return (
        linear.tp_group.size() == 1
        and linear.gtp_remat_size == 1
        and not linear.gradient_accumulation_fusion
        and not getattr(linear.config, "cpu_offloading", False)
    )
