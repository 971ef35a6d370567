"""How queries, keys and values lie in memory where attention runs on the host."""

from torch import Tensor

from loongplug.platform.devices import is_computed_on_host


def by_heads(x: Tensor) -> Tensor:
    """``x`` [batch, heads, s, dim] with a head's rows behind each other, where work is the host's.

    Megatron's layers have a token's batch and heads side by side, so that the rows of a head lie
    pages apart and share a few lines of the cache. A kernel of the host goes over them for every
    block of queries; one copy costs less. CUDA's kernels read either, and get what there is. An
    estimate's tensors, which have no values, lie as those of the run's device would.
    """
    if not is_computed_on_host(x) or x.stride(-2) == x.size(-1):
        return x
    return x.contiguous()
