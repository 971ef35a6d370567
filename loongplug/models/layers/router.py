"""The router's balancing losses, weighted so that their coefficients mean what they say."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from loongplug.context.token_split import ContextShard
from loongplug.models.layers.inputs import PackedSegments


def balances(config: TransformerConfig) -> bool:
    """Whether routers have a balancing loss or a z-loss."""
    return balances_by(
        experts=config.num_moe_experts,
        auxiliary=config.moe_aux_loss_coeff,
        z_loss=config.moe_z_loss_coeff,
    )


def balances_by(
    *, experts: int | None, auxiliary: float | Sequence[float], z_loss: float | None
) -> bool:
    """Whether there is such a loss, from the number of experts and the coefficients."""
    coefficients = auxiliary if isinstance(auxiliary, Sequence) else [auxiliary]
    return experts is not None and bool(any(coefficients) or z_loss)


def token_kinds(
    position_ids: Tensor,
    loss_mask: Tensor | None = None,
    *,
    packed: PackedSegments | None = None,
) -> Tensor:
    """Marks of a microbatch's tokens for routers, [b, 2 * s] bool.

    The first s columns mark padding, the others the tokens that count in the loss: none without a
    ``loss_mask``, which only balancing losses ask for. As one tensor,
    it goes wherever upstream takes its ``padding_mask``: through activation checkpoints to each
    router. Of rows whose tokens lie on several ranks, these are of the tokens that are held here:
    see :func:`of_whole_rows`.

    Args:
        position_ids: [axes, b, s] int64; 0 on all axes behind a row's first token is padding.
        loss_mask: [b, s], or None.
        packed: of a pack, where every sample begins at position 0, and which knows its padding; of
            any row whose tokens lie on several ranks.
    """
    row = None if packed is None else packed.context
    length = position_ids.shape[2] if row is None else row.split.length
    part = ContextShard.whole(length) if row is None else row.split.parts[row.rank]
    if packed is None or packed.qkv_format != "thd":
        padding = (position_ids == 0).all(dim=0)  # [b, s]
        padding[:, : _before(part, 1)] = False
    else:
        padding = torch.zeros_like(position_ids[0], dtype=torch.bool)
        padding[:, _before(part, length - packed.padding) :] = True
    counted = torch.zeros_like(padding) if loss_mask is None else loss_mask != 0
    return torch.cat([padding, counted], dim=1)


def _before(part: ContextShard, place: int) -> int:
    """How many tokens of the part lie before a place of the row."""
    return int(part.before(np.array(place)))


def of_whole_rows(kinds: Tensor, *, group: ProcessGroup) -> Tensor:
    """:func:`token_kinds` of all ranks' tokens, [b, 2 * s * ranks] bool, rank after rank.

    Collective: the context parallel ``group``.
    """
    if group.size() == 1:
        return kinds
    held = kinds.view(torch.uint8)
    parts = held.new_empty(group.size(), *held.shape)
    dist.all_gather_into_tensor(parts, held, group=group)
    padding, counted = parts.view(torch.bool).permute(1, 0, 2).chunk(2, dim=2)  # [b, ranks, s]
    return torch.cat([padding.flatten(1), counted.flatten(1)], dim=1)


class BalancedRouter(TopKRouter):
    """TopKRouter that sends padding to no expert, and balances by means over microbatches.

    Padding has no expert in the routing map and no probability, and it takes none of an expert's
    capacity. Nor does it count in a balancing loss.

    Upstream weights a microbatch's balancing loss by its number of tokens, though the step then
    divides by the tokens *that count in the loss*: a coefficient would grow by the ratio of the
    two, tenfold where one token in ten is trained on. Here the weight is the number of tokens that
    count. It is the same on all ranks that share a row, whatever part of the padding each of them
    has, and the global loss is not divided by the number of data parallel replicas.
    """

    # Of the microbatch that forward is at: tokens that count, tokens that are no padding.
    _counted: Tensor | None = None
    _valid: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map, both [tokens, experts]; nothing of padding.

        ``input`` is [s / (tp * cp), b, hidden], ``padding_mask`` [2 * s, b] :func:`token_kinds` of
        whole rows turned; None where there is no padding and nothing to balance.
        """
        self._counted = self._valid = local = None
        if padding_mask is not None:
            padding, counted = padding_mask.chunk(2)  # [s, b] each
            self._counted, self._valid = counted.sum(), (~padding).sum()
            # Parts of a row follow each other by rank, and each is split over the TP ranks.
            local = padding.chunk(self.tp_cp_group.size())[self.tp_cp_group.rank()]
            assert local.shape == input.shape[:2], (local.shape, input.shape)
        probs, routing_map = super().forward(input, local)
        if local is not None:
            real = ~local.reshape(-1, 1)  # [tokens, 1]
            probs, routing_map = probs * real, routing_map & real
        return probs, routing_map

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As upstream's; where experts have a capacity, of the tokens that are no padding alone."""
        if padding_mask is None or self.config.moe_expert_capacity_factor is None:
            return super().routing(logits, padding_mask=padding_mask)
        # Upstream takes the capacity from the number of tokens that it is given.
        real = (~padding_mask).flatten().nonzero().squeeze(1)  # [real tokens]
        tokens = logits.flatten(0, 1)  # [tokens, experts]
        probs, routing_map = super().routing(
            tokens.index_select(0, real).unsqueeze(1),
            padding_mask=torch.zeros_like(real, dtype=torch.bool).unsqueeze(1),
        )
        return (
            torch.zeros_like(tokens).index_copy(0, real, probs),
            torch.zeros_like(tokens, dtype=torch.bool).index_copy(0, real, routing_map),
        )

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        needs_dp_avg: bool = True,
        valid_token_count: int | Tensor | None = None,
    ) -> Tensor:
        """As upstream's, with the weight that the class describes."""
        if self._counted is not None and self.calculate_per_token_loss:
            # Upstream multiplies by the size of tp_cp_group once more. The loss is this rank's
            # share of the one over reduce_group: over the replicas as well, for the global loss.
            valid_token_count = self._counted * reduce_group.size() / self.tp_cp_group.size() ** 2
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss,
            aux_loss_name,
            reduce_group,
            needs_dp_avg=needs_dp_avg,
            valid_token_count=valid_token_count,
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """As upstream's, with the weight that the class describes."""
        coefficient = self.config.moe_z_loss_coeff
        if self._counted is None or self._valid is None or not self.calculate_per_token_loss:
            return super().apply_z_loss(logits, padding_mask=padding_mask)
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        assert padding_mask is not None
        squares = torch.logsumexp(logits, dim=-1).square() * ~padding_mask
        loss = squares.sum() / self._valid  # this rank's share of the mean over the microbatch
        get_moe_metrics_tracker().record(
            "z_loss",
            loss,
            self.layer_number,
            self.config.num_layers,
            reduce_group=self.tp_cp_group,
        )
        return MoEAuxLossAutoScaler.apply(logits, loss * coefficient * self._counted)
