"""An encoder that ``transformers`` computes, between our patches and our patch states."""

from collections.abc import Callable
from typing import Any, Self

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loongplug.data.microbatch import MediaInput
from loongplug.models.encoder import encoder_config
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.models.hugging_face_encoder.towers import make_tower, states_of
from loongplug.models.layers.inputs import made_again
from loongplug.models.layers.specs import Backend
from loongplug.models.patch_grids import frame_sizes


class HuggingFaceEncoder(MegatronModule):
    """An image encoder of ``transformers``, whole on each of its ranks; no collectives.

    All its layers run, also those behind the feature layer. Parameters that no feature comes from
    never train: a gradient that does not come would be waited for for ever where reductions overlap
    with backward. An empty unit is computed as :meth:`blank_unit`, of which the caller keeps
    nothing. Recomputed, backward runs the whole tower once more.
    """

    def __init__(self, config: TransformerConfig, architecture: HuggingFaceEncoderConfig) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        self.tower = make_tower(architecture)
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad_(name not in architecture.tower.carried)
            if name in architecture.tower.idle:
                # Its gradient is rounding, which differs by layout: Adam would make full steps.
                parameter.register_hook(torch.zeros_like)

    def train(self, mode: bool = True) -> Self:
        """As torch's, but the tower stays without dropout."""
        super().train(mode)
        self.tower.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As torch's, but the tower's tables keep their precision: rope's are of fp32."""
        before = {name: each for name, each in self.tower.named_buffers() if not each.is_meta}
        super()._apply(fn, recurse)
        for name, table in before.items():
            owner, _, own = name.rpartition(".")
            module: Any = self.tower.get_submodule(owner)
            setattr(module, own, table.to(module.get_buffer(own).device))
        return self

    def blank_unit(self) -> MediaInput:
        """The unit that stands for an empty one: one image, all zero."""
        side = self.architecture.side
        device = next(self.tower.parameters()).device
        return MediaInput(
            loaded=torch.zeros(side**2, self.architecture.row_values, device=device),
            grids=torch.tensor([[1, side, side]]),
        )

    def forward(self, vision: MediaInput) -> tuple[Tensor, list[Tensor]]:
        """The feature layer's states of a unit's patches, [patches, hidden], and no taps."""
        architecture, weight = self.architecture, next(self.tower.parameters())
        side, patch = architecture.side, architecture.patch_size
        sizes = frame_sizes(vision.grids)
        for height, width in sizes:
            if (height, width) != (side, side):
                raise ValueError(
                    f"An image has {height} x {width} patches, but the encoder takes {side} x "
                    f"{side} (image_size {architecture.image_size} over patch_size {patch}): "
                    "resize images to that size in the processor."
                )

        rows_of = vision.rows_of

        def images_of(loaded: Tensor) -> Tensor:  # [images, channels, height, width]
            # [images, row of patches, column of patches, channels, row, column]
            apart = (
                rows_of(loaded)
                .to(weight.dtype)
                .view(len(sizes), side, side, architecture.in_channels, patch, patch)
            )
            return apart.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

        def run(loaded: Tensor) -> Tensor:
            if not trains:
                return states_of(self.tower, images_of(loaded), vision=architecture)
            with ImagesMadeAgain(images_of, loaded) as given:
                return states_of(self.tower, given.images, vision=architecture)

        trains = torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters())
        recomputes = architecture.recompute and self.training and trains
        # [images, tokens, hidden]; a class token is the first
        states = made_again(run, vision.loaded) if recomputes else run(vision.loaded)
        return states[:, states.shape[1] - side**2 :].flatten(0, 1), []


class ImagesMadeAgain(TorchFunctionMode):
    """Inside, backward of the convolution that is given ``images`` makes them again."""

    def __init__(self, make: Callable[[Tensor], Tensor], loaded: Tensor) -> None:
        super().__init__()
        self._make, self._loaded = make, loaded
        self.images = make(loaded)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not torch.conv2d or args[0] is not self.images or not args[1].requires_grad:
            return func(*args, **named)
        first, make, others = [self.images], self._make, args[1:]
        return made_again(
            lambda loaded: func(first.pop() if first else make(loaded), *others, **named),
            self._loaded,
        )


def build_encoder(
    architecture: HuggingFaceEncoderConfig,
    *,
    decoder: TransformerConfig,
    groups: ProcessGroupCollection,
    backend: Backend,
) -> HuggingFaceEncoder:
    """The encoder with the decoder's precision, over ``groups``."""
    if (tp := groups.tp.size()) != 1:
        raise ValueError(
            f"The image encoder is a {architecture.model_type} of transformers, which is not "
            f"split, but its tensor parallel size is {tp}: set model.image_encoder."
            "tensor_model_parallel_size=1 with --enable-encoder-hetero-dp or "
            "--enable-full-hetero-dp, or --tensor-model-parallel-size 1."
        )
    config = encoder_config(architecture, decoder=decoder, tp=1)
    return HuggingFaceEncoder(config, architecture)
