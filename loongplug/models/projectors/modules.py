"""Projectors: a linear alone, or two with what their input is made of and a norm in front."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from loongplug.models.architecture import (
    EncoderArchitecture,
    ProjectorArchitecture,
    VisionArchitecture,
)
from loongplug.models.features import Features
from loongplug.models.layers.mlp import activation
from loongplug.models.layers.norm import LayerNorm
from loongplug.models.projectors import (
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
    """Tokens of the decoder's width from an encoder's patch states, by two linears.

    These are split over the tensor parallel group by columns, then by rows. Their input
    [tokens, width] is ``joined`` of the norm of what ``merged`` makes of states [patches, hidden].

    Collective: the tensor parallel group, forward and backward.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sizes: tuple[int, int, int],
        activation: Callable[[Tensor], Tensor],
        tp_group: dist.ProcessGroup,
        merged: Callable[[Tensor], Tensor] = lambda states: states,
        norm: nn.Module | None = None,
        joined: Callable[[Tensor], Tensor] = lambda states: states,
        bias: bool = True,
    ) -> None:
        super().__init__(config=config)
        width, inner, out = sizes
        self._merged, self._joined, self._activation = merged, joined, activation
        self.norm = norm
        assert config.init_method is not None
        linears = {"config": config, "init_method": config.init_method, "tp_group": tp_group}
        self.linear_fc1 = ColumnParallelLinear(
            width, inner, bias=bias, gather_output=False, **linears
        )
        self.linear_fc2 = RowParallelLinear(
            inner, out, bias=bias, input_is_parallel=True, skip_bias_add=False, **linears
        )

    def forward(self, states: Tensor, taps: list[Tensor]) -> Features:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        assert not taps, "taps have projectors of their own"
        rows = self._merged(states)
        inner, _ = self.linear_fc1(self._joined(rows if self.norm is None else self.norm(rows)))
        tokens, _ = self.linear_fc2(self._activation(inner))
        return Features(embeddings=tokens, deepstack=())


def patch_merger(
    config: TransformerConfig,
    *,
    norm: nn.Module,
    block_patches: int,
    output_size: int,
    tp_group: dist.ProcessGroup,
    norm_blocks: bool = False,
) -> MlpProjector:
    """Blocks of so many patches, each into one token; the norm is of patches or of whole blocks."""
    block = config.hidden_size * block_patches

    def joined(states: Tensor) -> Tensor:
        return states.reshape(-1, block)

    options: dict[str, Any] = {"merged" if norm_blocks else "joined": joined}
    return MlpProjector(
        config,
        sizes=(block, block, output_size),
        activation=F.gelu,
        norm=norm,
        tp_group=tp_group,
        **options,
    )


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
            assert isinstance(merger, MlpProjector)
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

        def merger(*, norm_blocks: bool) -> MlpProjector:
            width = config.hidden_size * (block_patches if norm_blocks else 1)
            return patch_merger(
                config,
                norm=norm(config, width, eps=architecture.layernorm_epsilon),
                block_patches=block_patches,
                output_size=output_size,
                tp_group=groups.tp,
                norm_blocks=norm_blocks,
            )

        self.merger = merger(norm_blocks=False)
        self.deepstack = _Mergers(merger(norm_blocks=True) for _ in vision.taps())

    def forward(self, states: Tensor, taps: list[Tensor]) -> Features:
        """Encoder output [patches, encoder hidden] to features [tokens, decoder hidden]."""
        behind = [each(tap, []) for each, tap in zip(self.deepstack, taps, strict=True)]
        return Features(
            embeddings=self.merger(states, []).embeddings,
            deepstack=tuple(each.embeddings for each in behind),
        )


def build_linear(
    architecture: LinearConfig,
    *,
    vision: EncoderArchitecture,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
) -> LinearProjector:
    """The linear of single states, of an encoder over any kind of media."""
    _check_unmerged(vision)
    _check_taps(vision)
    return LinearProjector(
        config=config, input_size=config.hidden_size, output_size=output_size, groups=groups
    )


def build_mlp(
    architecture: MlpConfig, *, vision: VisionArchitecture, **around: Any
) -> MlpProjector:
    """The MLP of single patches."""
    _check_unmerged(vision)
    return _mlp(architecture, vision, **around)


def build_pixel_shuffle(
    architecture: PixelShuffleConfig,
    *,
    vision: VisionArchitecture,
    config: TransformerConfig,
    **around: Any,
) -> MlpProjector:
    """A block's patches side by side, normed, and the MLP.

    A block's patches follow each other row by row, which is the order in which transformers'
    shuffle puts them side by side.
    """
    width = config.hidden_size * vision.spatial_merge_size**2
    return _mlp(
        architecture,
        vision,
        config=config,
        merged=lambda states: states.reshape(-1, width),
        width=width,
        norm=LayerNorm(config, width, eps=architecture.layernorm_epsilon),
        **around,
    )


def build_average_pool(
    architecture: AveragePoolConfig, *, vision: VisionArchitecture, **around: Any
) -> MlpProjector:
    """The mean of a block's patches, and the MLP."""
    patches = vision.spatial_merge_size**2
    return _mlp(
        architecture,
        vision,
        merged=lambda states: states.unflatten(0, (-1, patches)).mean(dim=1),
        **around,
    )


def _mlp(
    architecture: MlpConfig | PixelShuffleConfig | AveragePoolConfig,
    vision: VisionArchitecture,
    *,
    config: TransformerConfig,
    output_size: int,
    groups: ProcessGroupCollection,
    width: int | None = None,
    **options: Any,
) -> MlpProjector:
    """From a ``width``, of one patch where none is given, into the decoder's."""
    _check_taps(vision)
    return MlpProjector(
        config,
        sizes=(width or config.hidden_size, output_size, output_size),
        activation=activation(architecture.activation),
        bias=getattr(architecture, "bias", True),
        tp_group=groups.tp,
        **options,
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
