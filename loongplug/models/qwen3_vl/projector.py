"""The Qwen3-VL projector: patch merger and deepstack mergers."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.models.architecture import ProjectorArchitecture, VisionArchitecture
from loongplug.models.features import VisionFeatures
from loongplug.models.patch_merger import PatchMerger


class _Mergers(torch.nn.ModuleList):
    """Mergers whose checkpoints know how they are split.

    Megatron takes a plain ModuleList's tensors for copies that every tensor parallel rank has,
    and would save the first rank's share of them only.
    """

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The sharded tensors of all mergers, by their names."""
        shards: dict[str, Any] = {}
        for number, merger in enumerate(self):
            assert isinstance(merger, PatchMerger)
            shards |= merger.sharded_state_dict(f"{prefix}{number}.", sharded_offsets, metadata)
        return shards


class Qwen3VisionProjector(MegatronModule):
    """The merger of the last layer's states and one merger per deepstack tap."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        block_patches: int,
        output_size: int,
        deepstack: int,
        epsilon: float,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)

        def merger(*, norm_blocks: bool) -> PatchMerger:
            width = config.hidden_size * (block_patches if norm_blocks else 1)
            return PatchMerger(
                config,
                norm=torch.nn.LayerNorm(width, eps=epsilon),
                norm_blocks=norm_blocks,
                block_patches=block_patches,
                output_size=output_size,
                tp_group=pg_collection.tp,
            )

        self.merger = merger(norm_blocks=False)
        self.deepstack = _Mergers(merger(norm_blocks=True) for _ in range(deepstack))

    def forward(self, states: Tensor, taps: list[Tensor]) -> VisionFeatures:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        assert len(taps) == len(self.deepstack), (len(taps), len(self.deepstack))
        return VisionFeatures(
            embeddings=self.merger(states),
            deepstack=tuple(merger(tap) for merger, tap in zip(self.deepstack, taps, strict=True)),
        )


def build_projector(
    architecture: ProjectorArchitecture,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> Qwen3VisionProjector:
    """The projector behind an encoder of ``vision`` and ``config``."""
    return Qwen3VisionProjector(
        config,
        block_patches=vision.spatial_merge_size**2,
        output_size=output_size,
        deepstack=len(vision.taps()),
        epsilon=architecture.layernorm_epsilon,
        pg_collection=groups,
    )
