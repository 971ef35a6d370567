"""The Qwen2.5-VL projector: the patch merger."""

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.models.architecture import ProjectorArchitecture, VisionArchitecture
from loongplug.models.features import VisionFeatures
from loongplug.models.layers.norm import RMSNorm
from loongplug.models.patch_merger import PatchMerger


class Qwen25VisionProjector(MegatronModule):
    """The merger of the last layer's states, with RMSNorm on single patches."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        block_patches: int,
        output_size: int,
        epsilon: float,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.merger = PatchMerger(
            config,
            norm=RMSNorm(config, config.hidden_size, eps=epsilon),
            norm_blocks=False,
            block_patches=block_patches,
            output_size=output_size,
            tp_group=pg_collection.tp,
        )

    def forward(self, states: Tensor, taps: list[Tensor]) -> VisionFeatures:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        assert not taps, "this family has no deepstack"
        return VisionFeatures(embeddings=self.merger(states), deepstack=())


def build_projector(
    architecture: ProjectorArchitecture,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> Qwen25VisionProjector:
    """The projector behind an encoder of ``vision`` and ``config``."""
    return Qwen25VisionProjector(
        config,
        block_patches=vision.spatial_merge_size**2,
        output_size=output_size,
        epsilon=architecture.layernorm_epsilon,
        pg_collection=groups,
    )
