"""What goes over all tensors of an optimizer at once, without TransformerEngine and Apex.

Norms and scales of gradients, in the place of Megatron's loops, and Adam's steps on GPUs.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loongplug.platform.replacements import Replacement, as_wrapper

# Of Adam's settings: what the fused kernel takes, what it has not, and what scales gradients.
_KERNEL_SETTINGS = ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize")
_UNSERVED = ("amsgrad", "capturable", "differentiable")
_SCALING = ("grad_scale", "found_inf")


@as_wrapper
def norm_of_all(
    original: Any,
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor: bool,
    *args: Any,
) -> tuple[Tensor, None]:
    """Wrap Megatron's norm of lists of tensors, for which the host waits once for each tensor.

    The norm is [1] float32, on the tensors' device, and the host waits for nothing.
    """
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    if len({tensor.device for tensor in tensors}) != 1:  # of none, or of several
        return original(chunk_size, noop_flag, tensor_lists, per_tensor, *args)
    norms = torch._foreach_norm(tensors, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


@as_wrapper
def scale_of_all(
    original: Any,
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float,
) -> None:
    """Wrap Megatron's product of tensors and a number; of tensors in place, in one go."""
    sources, targets = tensor_lists
    in_place = len(sources) == len(targets) and all(map(operator.is_, sources, targets))
    if targets and in_place:  # torch takes no empty lists, as of a rank of padding only
        torch._foreach_mul_(list(targets), scale)
    else:
        original(chunk_size, noop_flag, tensor_lists, scale)


@as_wrapper
def fused_adam(
    original: Any,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *scaling: Any,
    **settings: Any,
) -> None:
    """Wrap the steps of torch's Adam that go over lists: by the fused kernel where that serves.

    It rounds otherwise, and holds no roots of second moments. Steps stay counted on the host, where
    checkpoints have them. On a CPU, a tensor's last values, too few for a vector, may differ in
    their last bit from those of the same tensor cut elsewhere.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    scaled = any(each is not None for each in (*scaling, *map(settings.get, _SCALING)))
    plain = not scaled and not any(map(settings.get, _UNSERVED))
    alike = all(
        each.dtype == torch.float32 and each.is_contiguous()
        for tensors in lists
        for each in tensors
    )
    numbers = all(isinstance(settings[name], float) for name in ("lr", "beta1", "beta2"))
    on_host = all(step.device.type == "cpu" for step in state_steps)
    # A rank whose shard has none of a group's parameters steps with empty lists.
    if not (params and plain and alike and numbers and on_host):
        original(*lists, max_exp_avg_sqs, state_steps, *scaling, **settings)
        return
    torch._foreach_add_(state_steps, 1)
    together: defaultdict[tuple[torch.device, float], list[int]] = defaultdict(list)
    for number, (param, step) in enumerate(zip(params, state_steps, strict=True)):
        together[param.device, step.item()].append(number)
    decoupled = settings["decoupled_weight_decay"]
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    chosen = {name: settings[name] for name in _KERNEL_SETTINGS}
    for (device, count), places in together.items():
        # The kernel reads each tensor's step from the device: filled there, nothing is copied.
        counted = torch.full((), count, dtype=torch.float32, device=device)
        some = [[each[place] for place in places] for each in lists]
        kernel(*some, [], [counted] * len(places), amsgrad=False, **chosen)


OF_GRADIENTS: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.core.utils.local_multi_tensor_l2_norm",
        wrapper=norm_of_all,
        parameters="(chunk_size, noop_flag, tensor_lists, per_tensor, *args)",
        reason="has the host wait once for each gradient tensor",
    ),
    Replacement(
        target="megatron.core.utils.local_multi_tensor_scale",
        wrapper=scale_of_all,
        parameters="(chunk_size, noop_flag, tensor_lists, scale)",
        reason="launches two kernels for each gradient tensor, and makes a copy in between",
    ),
)

ON_CUDA: tuple[Replacement, ...] = (
    Replacement(
        target="torch.optim.adam._multi_tensor_adam",
        wrapper=fused_adam,
        reason="holds the roots of all second moments at once, 4 bytes for each trained number, "
        "which kernels of their own write and read",
    ),
)
