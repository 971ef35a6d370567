"""The layer of experts, and experts for machines without TransformerEngine."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank
from torch import Tensor

from loongplug.models.layers.mlp import LocalMLP


class ExpertLayer(MoELayer):
    """MoELayer whose experts are reduced and optimized apart from all else, in every layout.

    Upstream does so where expert parallelism or expert tensor parallelism asks for groups of their
    own; elsewhere it has one optimizer, and no checkpoint of two would load into it.
    """

    # [b, 2 * s] bool, router.token_kinds of the microbatch at work, for callers of the layer's
    # parts who have no way to give it.
    token_kinds: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.experts.parameters():
            parameter.allreduce = False

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As upstream's; without a ``padding_mask`` [2 * s, b] that of ``token_kinds``."""
        if padding_mask is None and self.token_kinds is not None:
            padding_mask = self.token_kinds.transpose(0, 1)
        result: tuple[Tensor, Tensor] = super().route(hidden_states, padding_mask)
        return result


class LocalExperts(SequentialMLP):
    """SequentialMLP whose experts start unlike those of the other ranks, on the CPU too.

    Upstream draws weights that are initialised on the CPU from one generator that is the same on
    all ranks of an expert parallel group, so that each would start with the same few experts.
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


class LocalSharedExperts(SharedExpertMLP, LocalMLP):
    """SharedExpertMLP with this package's SwiGLU."""
