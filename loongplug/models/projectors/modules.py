"""Projectors: a linear alone, or an MLP, with what its input is made of and a norm in front."""

from collections.abc import Callable

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.models.architecture import EncoderArchitecture, VisionArchitecture
from loongplug.models.features import Features
from loongplug.models.layers.activations import activation
from loongplug.models.layers.norm import LayerNorm
from loongplug.models.projectors.config import (
    AveragePoolConfig,
    LinearConfig,
    MlpConfig,
    PixelShuffleConfig,
)


class LinearProjector(MegatronModule):
    """Tokens of the decoder's width from an encoder's states, one for each.

    The linear is split over the tensor parallel group by its outputs. It is called as the first of
    an MLP's, by which name adapters know it.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        input_size: int,
        output_size: int,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self._group = groups.tp
        assert config.init_method is not None
        self.linear_fc1 = ColumnParallelLinear(
            input_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=True,
            gather_output=False,  # an adapter's outputs are split as well
            tp_group=groups.tp,
        )

    def forward(self, states: Tensor, taps: list[Tensor]) -> Features:
        """Encoder output [states, encoder hidden] to features [states, decoder hidden].

        Collective: the tensor parallel group, forward and backward.
        """
        assert not taps, "taps have projectors of their own"
        own, _ = self.linear_fc1(states)  # [states, decoder hidden / tp]
        tokens = gather_from_tensor_model_parallel_region(own, group=self._group)
        return Features(embeddings=tokens, deepstack=())


class MlpProjector(MegatronModule):
    """Tokens of the decoder's width from an encoder's patch states.

    ``merged`` makes the MLP's input [tokens, input_size] of states [patches, hidden]. The two
    linear layers are split over the tensor parallel group: column, then row.
    """

    def __init__(
        self,
        architecture: MlpConfig | PixelShuffleConfig | AveragePoolConfig,
        *,
        config: TransformerConfig,
        input_size: int,
        output_size: int,
        merged: Callable[[Tensor], Tensor],
        bias: bool,
        groups: ProcessGroupCollection,
        norm: LayerNorm | None = None,
    ) -> None:
        super().__init__(config=config)
        self._merged = merged
        self._activation = activation(architecture.activation)
        self.norm = norm
        assert config.init_method is not None
        self.linear_fc1 = ColumnParallelLinear(
            input_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=bias,
            gather_output=False,
            tp_group=groups.tp,
        )
        self.linear_fc2 = RowParallelLinear(
            output_size,
            output_size,
            config=config,
            init_method=config.init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
        )

    def forward(self, states: Tensor, taps: list[Tensor]) -> Features:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden].

        Collective: the tensor parallel group, forward and backward.
        """
        assert not taps, "taps have projectors of their own"
        merged = self._merged(states)
        inner, _ = self.linear_fc1(merged if self.norm is None else self.norm(merged))
        tokens, _ = self.linear_fc2(self._activation(inner))
        return Features(embeddings=tokens, deepstack=())


def build_linear(
    architecture: LinearConfig,
    *,
    vision: EncoderArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> LinearProjector:
    """The linear of single states, of an encoder over any kind of media.

    Raises:
        ValueError: the encoder's patches are to be merged.
    """
    _check_unmerged(vision)
    _check_taps(vision)
    return LinearProjector(
        config=config, input_size=config.hidden_size, output_size=output_size, groups=groups
    )


def build_mlp(
    architecture: MlpConfig,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> MlpProjector:
    """The MLP of single patches.

    Raises:
        ValueError: the encoder's patches are to be merged.
    """
    _check_unmerged(vision)
    _check_taps(vision)
    return MlpProjector(
        architecture,
        config=config,
        input_size=config.hidden_size,
        output_size=output_size,
        merged=lambda states: states,
        bias=architecture.bias,
        groups=groups,
    )


def build_pixel_shuffle(
    architecture: PixelShuffleConfig,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> MlpProjector:
    """A block's patches side by side, normed, and the MLP.

    A block's patches follow each other row by row, which is the order in which transformers'
    shuffle puts them side by side.
    """
    _check_taps(vision)
    width = config.hidden_size * vision.spatial_merge_size**2
    return MlpProjector(
        architecture,
        config=config,
        input_size=width,
        output_size=output_size,
        merged=lambda states: states.reshape(-1, width),
        norm=LayerNorm(config, width, eps=architecture.layernorm_epsilon),
        bias=True,
        groups=groups,
    )


def build_average_pool(
    architecture: AveragePoolConfig,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> MlpProjector:
    """The mean of a block's patches, and the MLP."""
    _check_taps(vision)
    patches = vision.spatial_merge_size**2
    return MlpProjector(
        architecture,
        config=config,
        input_size=config.hidden_size,
        output_size=output_size,
        merged=lambda states: states.unflatten(0, (-1, patches)).mean(dim=1),
        bias=architecture.bias,
        groups=groups,
    )


def _check_unmerged(vision: EncoderArchitecture) -> None:
    if isinstance(vision, VisionArchitecture) and vision.spatial_merge_size != 1:
        raise ValueError(
            f"spatial_merge_size of the encoder is {vision.spatial_merge_size}, but its projector "
            "makes a token of each patch: set it to 1, or take a projector that merges, "
            "pixel_shuffle or average_pool."
        )


def _check_taps(vision: EncoderArchitecture) -> None:
    if vision.taps():
        raise ValueError(
            f"The encoder taps its layers {list(vision.taps())}, for which this projector has "
            "nothing: take a projector with deepstack, such as qwen3_merger."
        )
