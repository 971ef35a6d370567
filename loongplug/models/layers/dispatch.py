"""The exchange of tokens between the ranks of experts, of those tokens alone that have experts."""

from typing import Self

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


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
