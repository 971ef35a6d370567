"""The composed model: image encoder, projector and text decoder as one Megatron module."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from loongplug.data.microbatch import VisionInput
from loongplug.models.decoder import TextDecoder
from loongplug.models.features import FeatureSource, VisionFeatures
from loongplug.parallel.module_state import ModulePart, ModuleState


class MultimodalModel(MegatronModule):
    """One pipeline stage (or virtual chunk) of a multimodal model.

    The first stage has the encoder and the projector beside its decoder layers; other stages have
    them in the modes in which all ranks encode, else decoder layers only. What Megatron's training
    loop asks of a language model is answered by the decoder.
    """

    # What Megatron's combined schedule asks for in forward's place, with forward's arguments; set
    # where a run overlaps (loongplug.schedule).
    build_schedule_plan: Callable[..., AbstractSchedulePlan]

    def __init__(
        self,
        text_decoder: TextDecoder,
        *,
        image_encoder: MegatronModule | None,
        image_projector: MegatronModule | None,
        pg_collection: ProcessGroupCollection,
        encoder_state: ModuleState,
        lr_mults: dict[str, float] | None = None,
    ) -> None:
        super().__init__(config=text_decoder.config)
        assert (image_encoder is None) == (image_projector is None)
        self.image_encoder = image_encoder
        self.image_projector = image_projector
        self.text_decoder = text_decoder
        self.pg_collection = pg_collection
        self.encoder_state = encoder_state
        self.lr_mults = lr_mults or {}
        self.feature_source: FeatureSource | None = None  # None: encode in each forward
        self.pre_process = text_decoder.pre_process
        self.post_process = text_decoder.post_process
        self.vp_stage = text_decoder.vp_stage
        self.share_embeddings_and_output_weights = text_decoder.share_embeddings_and_output_weights

    def parallel_parts(self) -> tuple[ModulePart, ModulePart]:
        """What has data parallel groups, gradient buffers and an optimizer of its own."""

        def rates(*names: str) -> dict[str, float]:
            return {name: self.lr_mults[name] for name in names if name in self.lr_mults}

        vision: dict[str, nn.Module | None] = {
            "image_encoder": self.image_encoder,
            "image_projector": self.image_projector,
        }
        return (
            ModulePart(
                name="image_encoder",
                state=self.encoder_state,
                modules={name: module for name, module in vision.items() if module is not None},
                lr_mults=rates(*vision),
            ),
            ModulePart(
                name="text_decoder",
                state=ModuleState(groups=self.pg_collection),
                modules={"text_decoder": self.text_decoder},
                lr_mults=rates("text_decoder"),
            ),
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As Megatron's, each part with the data parallel group of its own replicas."""
        sharded: dict[str, Any] = {}
        for part in self.parallel_parts():
            of_part = {**(metadata or {}), "dp_cp_group": part.state.groups.dp_cp}
            with part.state.entered():
                for name, module in part.modules.items():
                    assert isinstance(module, MegatronModule)
                    sharded |= module.sharded_state_dict(
                        f"{prefix}{name}.", sharded_offsets, of_part
                    )
        return sharded

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Take the previous stage's hidden states (Megatron's schedules call this)."""
        self.text_decoder.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied embedding's weight on the stages that hold it."""
        return self.text_decoder.shared_embedding_or_output_weight()

    def freeze(self, *, image_encoder: bool, image_projector: bool, text_decoder: bool) -> None:
        """Stop training the named modules on the stages that have them."""
        for frozen, module in (
            (image_encoder, self.image_encoder),
            (image_projector, self.image_projector),
            (text_decoder, self.text_decoder),
        ):
            if frozen and module is not None:
                module.requires_grad_(False)

    def encode(self, vision: VisionInput | None) -> VisionFeatures:
        """Vision features of one unit; the encoder's tensor parallel group enters together.

        A unit without images, or None, runs through the encoder like any other, as a blank image
        whose features are dropped: its parameters then have a (zero) gradient in every microbatch,
        which the overlapped gradient reduction counts on.
        """
        assert self.image_encoder is not None
        assert self.image_projector is not None
        trainable = any(parameter.requires_grad for parameter in self.image_encoder.parameters())
        empty = vision is None or vision.pixels.shape[0] == 0
        if vision is None or empty:
            vision = self.image_encoder.blank_unit()
        # A frozen encoder's activations serve no backward pass: do not keep them.
        with torch.set_grad_enabled(trainable and torch.is_grad_enabled()):
            states, taps = self.image_encoder(vision)
        features: VisionFeatures = self.image_projector(states, taps)
        return features.none_of_them() if empty else features

    def features(
        self, input_ids: Tensor, *, vision: VisionInput | None, number: int | None
    ) -> VisionFeatures | None:
        """What the decoder embeds of microbatch ``number`` of the step, on the first stage.

        From the feature source, or where there is none from ``vision``, with zero rows for a
        text-only one; None on other stages. All schedules ask here. Collective as the source is,
        or as :meth:`encode`.
        """
        if not self.pre_process:
            return None
        if self.feature_source is not None:
            assert number is not None, "the source knows units by their microbatch's number"
            return self.feature_source.features(number)
        if self.image_encoder is None:
            return None
        assert vision is not None, "the first stage needs the unit's images"
        return self.text_decoder.share_of(self.encode(vision), input_ids)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        vision: VisionInput | None = None,
        number: int | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """This stage's forward; shapes as in :meth:`features` and :meth:`TextDecoder.forward`."""
        features = self.features(input_ids, vision=vision, number=number)
        return self.text_decoder(
            input_ids, position_ids, features=features, labels=labels, **kwargs
        )
