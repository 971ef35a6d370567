"""The patch transformer: patches of square images in, patch states out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn

from loongplug.data.microbatch import MediaInput
from loongplug.models.encoder import (
    Carried,
    EncoderInput,
    HandedOn,
    StagedEncoder,
    hold_key_bias,
)
from loongplug.models.hf_mapping import CARRIED
from loongplug.models.layers.inputs import embedded, input_for_recompute, pack_segments
from loongplug.models.layers.mlp import activation
from loongplug.models.layers.norm import LayerNorm
from loongplug.models.layers.specs import Backend, vision_layer_spec
from loongplug.models.patch_grids import frame_sizes, patch_coordinates
from loongplug.models.patch_transformer import PatchTransformerConfig
from loongplug.models.patch_transformer.hf import carried_tensors
from loongplug.platform.devices import to_device

Added = tuple[Tensor, Tensor | None]  # an output, and the bias that is left to add


class ScaledResidual(nn.Module):
    """Layer scale: a trained factor for each channel of what attention and MLP add to the residual.

    In the place of Megatron's bias, dropout and addition: bias, factor and addition.

    ``weight`` is [hidden], the same on every tensor parallel rank, whose gradient is too: it
    multiplies what has been reduced over them. No dropout, and no sequence parallelism.
    """

    def __init__(self, *, hidden_size: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), start))

    def forward(self, training: bool, fused: bool) -> Callable[[Added, Tensor, float], Tensor]:
        """The addition, as Megatron's layer calls it with output, residual and dropout."""

        def add(added: Added, residual: Tensor, dropout: float) -> Tensor:
            assert dropout == 0.0, "an encoder has none"
            output, bias = added
            if bias is not None:
                output = output + bias
            return torch.addcmul(residual, output, self.weight)

        return add


def with_layer_scale(spec: ModuleSpec, *, hidden_size: int, start: float) -> ModuleSpec:
    """The layer of ``spec`` with factors that begin at ``start``."""
    submodules = spec.submodules
    assert isinstance(submodules, TransformerLayerSubmodules)
    scaled = ModuleSpec(module=ScaledResidual, params={"hidden_size": hidden_size, "start": start})
    return replace(spec, submodules=replace(submodules, self_attn_bda=scaled, mlp_bda=scaled))


class PatchTransformer(StagedEncoder[PatchTransformerConfig]):
    """ViT over packed images of one size; attention stays within an image.

    An image's class token, where the kind has one, stands before its patches within the layers and
    is left out of what comes out. The blank unit has the positions of the table's first corner.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: PatchTransformerConfig,
        *,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, architecture, backend=backend, pg_collection=pg_collection)
        self.tp_group = pg_collection.tp
        self._places_on: dict[tuple[int, torch.device], Tensor] = {}
        if self.stage.first:
            self._build_embeddings()
        spec = vision_layer_spec(config, backend=backend)
        start: float | None = getattr(architecture, "layer_scale", None)
        if start is not None:
            spec = with_layer_scale(spec, hidden_size=architecture.hidden_size, start=start)
        self.blocks = TransformerBlock(
            config=config, spec=spec, post_layer_norm=False, pg_collection=pg_collection
        )
        for layer in self.blocks.layers:
            hold_key_bias(layer.self_attention.linear_qkv.bias, head=config.kv_channels)
        last = self.stage.last
        self.final_norm = self._norm() if last and architecture.norms_features else None
        if last and (tensors := carried_tensors(architecture)):
            self.add_module(CARRIED, Carried(tensors))

    @classmethod
    def megatron_settings(cls, architecture: PatchTransformerConfig) -> dict[str, Any]:
        """LayerNorm and the kind's activation; sizes have to fit each other."""
        side = architecture.side
        architecture.require_feature_layer()
        if architecture.temporal_patch_size != 1:
            raise ValueError(
                f"temporal_patch_size is {architecture.temporal_patch_size}, and the encoder sees "
                "one frame at a time: set it to 1."
            )
        if side < 1 or side % architecture.spatial_merge_size:
            raise ValueError(
                f"image_size {architecture.image_size} over patch_size {architecture.patch_size} "
                f"gives {side} patches a side, which cannot be merged in blocks of "
                f"spatial_merge_size {architecture.spatial_merge_size}: choose sizes that divide."
            )
        if architecture.final_norm and not architecture.names.features_have_norm:
            raise ValueError(
                "final_norm is set, but this encoder's norm behind the last layer is of the pooled "
                "class token alone: leave it unset."
            )
        return {
            "normalization": "LayerNorm",
            "activation_func": activation(architecture.activation),
        }

    def _build_embeddings(self) -> None:
        config, architecture = self.config, self.architecture
        hidden, names = architecture.hidden_size, architecture.names
        own_tokens = 0 if names.class_token is None else 1
        # A convolution whose stride is its kernel is a linear map of each patch.
        self.patch_embed = nn.Linear(architecture.row_values, hidden, bias=names.patches_bias)
        self.position_embedding = nn.Embedding(own_tokens + architecture.side**2, hidden)
        self.class_token = nn.Parameter(torch.zeros(hidden)) if own_tokens else None
        self.pre_norm = self._norm() if names.pre_norm else None
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(self.patch_embed.weight)
            if names.patches_bias:
                nn.init.zeros_(self.patch_embed.bias)
            config.init_method(self.position_embedding.weight)
            if self.class_token is not None:
                config.init_method(self.class_token)

    def _norm(self) -> LayerNorm:
        size, eps = self.architecture.hidden_size, self.architecture.layernorm_epsilon
        return LayerNorm(self.config, size, eps=eps)

    def forward(self, vision: EncoderInput) -> tuple[Tensor, list[Tensor]]:
        """Encode all images of one unit, or go on from where the stage before has come.

        Returns:
            the feature layer's states in the patches' own order, [patches, hidden], and no taps;
            from a stage that is not the last those of all tokens, [tokens, hidden].
        """
        side, images = self._grid(vision)
        tokens = side**2 + self.architecture.has_class_token()  # of an image
        device = next(self.parameters()).device
        own = vision.states if isinstance(vision, HandedOn) else self._embed(vision, side, images)
        states = self.blocks(
            hidden_states=input_for_recompute(own[:, None], layers=self.blocks),
            attention_mask=None,
            packed_seq_params=pack_segments([tokens] * images, device=device),
        )[:, 0]
        if not self.stage.last:
            return states, []
        if self.final_norm is not None:
            states = self.final_norm(states)
        # [images, tokens, hidden]; a class token is the first.
        apart = states.unflatten(0, (images, tokens))
        return apart[:, tokens - side**2 :].flatten(0, 1), []

    def _embed(self, vision: MediaInput, side: int, images: int) -> Tensor:
        """The input of the layers, [tokens of all images, hidden]."""
        weight = self.patch_embed.weight
        # Called, not only read: parameters that are gathered meanwhile are waited for by a hook.
        patches = embedded(vision, self.patch_embed)
        tokens = patches.unflatten(0, (images, side**2))  # [images, tokens, hidden]
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(images, 1, -1), tokens], dim=1)
        places = self._places(side, weight.device)
        states = (tokens + self.position_embedding(places)).flatten(0, 1)
        return states if self.pre_norm is None else self.pre_norm(states)

    def _grid(self, vision: EncoderInput) -> tuple[int, int]:
        """The side of all of a unit's images in patches, and how many images there are."""
        sizes = frame_sizes(vision.grids)
        architecture = self.architecture
        side, merge = architecture.side, architecture.spatial_merge_size
        if sizes == [(merge, merge)]:
            return merge, 1
        for height, width in sizes:
            if (height, width) != (side, side):
                raise ValueError(
                    f"An image has {height} x {width} patches, but the encoder's position table is "
                    f"of {side} x {side} (image_size {architecture.image_size} over patch_size "
                    f"{architecture.patch_size}): resize images to that size in the processor."
                )
        return side, len(sizes)

    def _places(self, side: int, device: torch.device) -> Tensor:
        """Places of an image's tokens in the table of positions, [tokens] int64.

        Kept on ``device`` for both sides that there are: that of images and that of a blank one.
        """
        key = side, device
        if key not in self._places_on:
            # An evaluation may ask first, and training cannot save tensors of its kind.
            with torch.inference_mode(False):
                self._places_on[key] = to_device(self._places_on_host(side), device)
        return self._places_on[key]

    def _places_on_host(self, side: int) -> Tensor:
        row, column = patch_coordinates(side, side, merge=self.architecture.spatial_merge_size)
        places = row * self.architecture.side + column
        if self.class_token is None:
            return places
        return torch.cat([torch.zeros(1, dtype=torch.int64), 1 + places])


build_encoder = PatchTransformer.build
