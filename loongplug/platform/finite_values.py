"""What is not finite: whether a tensor is, and whose gradients were before replicas summed them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from loongplug.platform.replacements import as_wrapper


@as_wrapper
def norms_before_sums(
    original: Any, self: Any, check_for_nan_or_inf: bool, check_for_large: bool
) -> None:
    """Wrap Megatron's check of a bucket group: norms are kept for :func:`take_broken`.

    Upstream's has the host wait for the device in the middle of the backward, twice for each
    bucket. Where Megatron is asked to run steps again (``--rerun-mode``), the check is upstream's.
    """

    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    rerun = get_rerun_state_machine()
    if check_for_nan_or_inf and rerun.get_mode() == RerunMode.DISABLED:
        check_for_nan_or_inf = False
        gradients = [parameter.main_grad for parameter in _parameters(self)]
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        self.norms_before_sum = torch.stack(norms)  # [parameters]
    if check_for_nan_or_inf or check_for_large:
        original(self, check_for_nan_or_inf, check_for_large)


def take_broken(groups: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters of bucket groups whose gradients had no finite norm here, before the sum.

    What was kept is forgotten. The host waits for the device once.
    """
    parameters, norms = [], []
    for group in groups:
        if hasattr(group, "norms_before_sum"):
            parameters += _parameters(group)
            norms.append(group.norms_before_sum)
            del group.norms_before_sum
    if not norms:
        return []
    finite = torch.isfinite(torch.cat(norms)).tolist()
    return [each for each, sound in zip(parameters, finite, strict=True) if not sound]


def _parameters(group: Any) -> list[Any]:
    return [parameter for bucket in group.buckets for parameter in bucket.params_list]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value of the tensor is NaN or infinite. The host waits for the device."""
    if tensor.numel() == 0:
        return True
    # One pass and no copy, some 30 times as fast as asking each value; NaN is both ends' then.
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all())
