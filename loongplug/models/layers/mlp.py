"""MLPs: the layer of experts, and dense ones and experts for machines without TransformerEngine;
activation functions by their names.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank
from torch import Tensor

from loongplug.models.layers.grouped import Groups, JoinedExperts, joinable, kernel_takes, watched

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that ``transformers`` calls ``name``."""
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"activation is {name!r}, and known are {', '.join(_ACTIVATIONS)}: take one of them."
        )
    return _ACTIVATIONS[name]


class LocalMLP(MLP):
    """Megatron's MLP with a SwiGLU that does not stitch its gradient together.

    Used where ``config`` asks for SwiGLU and no fused kernel (``bias_activation_fusion``);
    everything else is upstream's. Without a compiler, as on the CPU, the fused kernel runs
    operation by operation and is the slowest of the three.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.plain_swiglu = (
            config.gated_linear_unit
            and config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and config.glu_linear_offset == 0.0
            and not config.bias_activation_fusion
            and not config.use_te_activation_func
        )

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] -> [s, b, hidden] and the bias that is left to add, or None."""
        if not self.plain_swiglu or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        gate_up, bias = self.linear_fc1(hidden_states)  # [s, b, 2 * ffn / tp]
        if bias is not None:
            gate_up = gate_up + bias
        return self.linear_fc2(swiglu(gate_up))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for the halves of the last dimension, [..., 2 * ffn] -> [..., ffn]."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Writes both halves of the gradient where they belong; autograd would concatenate them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return result


class RealTokensDispatcher(MoEAlltoAllTokenDispatcher):
    """Upstream's, for a routing map in which padding has no experts.

    Upstream takes it that every token has as many, unless experts have a capacity: padding's rows
    would be sent in a count that the others' splits do not have.
    """

    # Whether the routing map that comes next may leave tokens out.
    leaves_out = False

    @classmethod
    def like(cls, dispatcher: MoEAlltoAllTokenDispatcher) -> Self:
        """In the place of a ``dispatcher`` that has not been used yet."""
        found = cls.__new__(cls)
        found.__dict__.update(dispatcher.__dict__)
        return found

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """As upstream's: tokens of each local expert, by ``routing_map`` [tokens, experts].

        Where tokens are left out, the host waits for their number before they are sorted. As
        upstream, it waits for the splits in any case, a few kernels later.
        Collective: the expert and expert tensor parallel group.
        """
        self.cuda_sync_point = "no_sync"  # upstream keeps the earliest of all microbatches
        counts: Tensor = super().preprocess(routing_map)
        if self.leaves_out:
            self.num_out_tokens = routing_map.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return counts


class ExpertLayer(MoELayer):
    """MoELayer whose experts get no padding, and are optimized apart from all else.

    They are reduced and optimized apart in every layout. Upstream does so where expert parallelism
    or expert tensor parallelism asks for groups of their own; elsewhere it has one optimizer, and
    no checkpoint of two would load into it.
    """

    # [b, 2 * s] bool, router.token_kinds of the microbatch at work, for callers of the layer's
    # parts who have no way to give it.
    token_kinds: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.experts.parameters():
            parameter.allreduce = False
        dispatcher: Any = self.token_dispatcher
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            self.token_dispatcher: Any = RealTokensDispatcher.like(dispatcher)

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As upstream's; without a ``padding_mask`` [2 * s, b] that of ``token_kinds``."""
        if padding_mask is None and self.token_kinds is not None:
            padding_mask = self.token_kinds.transpose(0, 1)
        dispatcher: Any = self.token_dispatcher
        if isinstance(dispatcher, RealTokensDispatcher):
            dispatcher.leaves_out = padding_mask is not None
        return super().route(hidden_states, padding_mask)


class LocalExperts(SequentialMLP):
    """SequentialMLP that computes each linear of all its experts at once, where it can.

    It does not where something stands at single linears, as LoRA's adapters do, or where these
    are not this package's alone (:mod:`loongplug.models.layers.grouped`). ``joined`` says whether
    it may.

    Experts start unlike those of the other ranks, on the CPU too: upstream draws weights that are
    initialised on the CPU from one generator that is the same on all ranks of an expert parallel
    group, so that each would start with the same few experts.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        assert pg_collection is not None
        seed = int(torch.randint(2**31, (), device="cpu"))  # the same on every rank of the group
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed + get_pg_rank(pg_collection.ep))
            super().__init__(num_local_experts, config, submodules, pg_collection, **kwargs)
        self.joined = (
            num_local_experts > 1
            and not config.moe_apply_probs_on_input
            and joinable(list(self.local_experts))
        )

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens, hidden], [local experts] int64 and [tokens] to [tokens, hidden] and None.

        Tokens stand by experts; what an expert makes of one is weighted by its probability.
        """
        tokens, experts = permuted_local_hidden_states, list(self.local_experts)
        if not self.joined or watched(experts):
            return super().forward(tokens, tokens_per_expert, permuted_probs)
        kernel = kernel_takes(experts, tokens)
        groups = Groups.of(tokens_per_expert.tolist(), tokens, kernel=kernel)
        output, _ = JoinedExperts(experts, groups)(tokens, permuted_probs)
        return output, None


class LocalSharedExperts(SharedExpertMLP, LocalMLP):
    """SharedExpertMLP with this package's SwiGLU."""
