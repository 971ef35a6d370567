"""Merge blocks of patches into tokens of the decoder's width."""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F


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
