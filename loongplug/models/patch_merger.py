"""Projectors: blocks of patches are merged into tokens of the decoder's width."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from loongplug.models.architecture import ProjectorArchitecture, VisionArchitecture
from loongplug.models.features import Features


class PatchMerger(MegatronModule):
    """Merge each ``merge x merge`` block of patches into one token of the decoder's width.

    ``norm`` works on single patches, or on whole blocks with ``norm_blocks`` (Qwen3-VL's
    deepstack). The two linear layers are split over the tensor parallel group: column, then row.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        norm: nn.Module,
        norm_blocks: bool,
        block_patches: int,
        output_size: int,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        self.block_size = config.hidden_size * block_patches
        self.norm = norm
        self.norm_blocks = norm_blocks
        assert config.init_method is not None
        self.linear_fc1 = ColumnParallelLinear(
            self.block_size,
            self.block_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            tp_group=tp_group,
        )
        self.linear_fc2 = RowParallelLinear(
            self.block_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tp_group,
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Patch states [patches, hidden] in block order to tokens [tokens, output_size]."""
        if self.norm_blocks:
            blocks = self.norm(patches.reshape(-1, self.block_size))
        else:
            blocks = self.norm(patches).reshape(-1, self.block_size)
        inner, _ = self.linear_fc1(blocks)
        tokens, _ = self.linear_fc2(F.gelu(inner))
        return tokens


class _Mergers(nn.ModuleList):
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


class VisionProjector(MegatronModule):
    """The merger of the last layer's states, and one merger for each of the encoder's taps."""

    def __init__(
        self,
        architecture: ProjectorArchitecture,
        *,
        vision: VisionArchitecture,
        config: TransformerConfig,
        output_size: int,
        groups: ProcessGroupCollection,
        norm: Callable[..., nn.Module],
    ) -> None:
        """Behind an encoder of ``vision`` and ``config``.

        ``norm`` is called with a config, a width and ``eps``; taps are normed in whole blocks.
        """
        super().__init__(config=config)
        block_patches = vision.spatial_merge_size**2

        def merger(*, norm_blocks: bool) -> PatchMerger:
            width = config.hidden_size * (block_patches if norm_blocks else 1)
            return PatchMerger(
                config,
                norm=norm(config, width, eps=architecture.layernorm_epsilon),
                norm_blocks=norm_blocks,
                block_patches=block_patches,
                output_size=output_size,
                tp_group=groups.tp,
            )

        self.merger = merger(norm_blocks=False)
        self.deepstack = _Mergers(merger(norm_blocks=True) for _ in vision.taps())

    def forward(self, states: Tensor, taps: list[Tensor]) -> Features:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        return Features(
            embeddings=self.merger(states),
            deepstack=tuple(merger(tap) for merger, tap in zip(self.deepstack, taps, strict=True)),
        )
