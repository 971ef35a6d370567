"""The text decoder: Megatron's GPTModel with multimodal rope and vision features in place."""

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.models.deepstack import stack_features
from loongplug.models.features import VisionFeatures, place, share_of, visual_positions
from loongplug.models.layers.packed import PackedSegments
from loongplug.models.layers.recompute import input_for_recompute
from loongplug.models.layers.router import balances, token_kinds
from loongplug.models.mrope import MultimodalRotary


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's transformer config plus what the deepstack layers need to know."""

    bf16: bool = False  # Megatron's
    deepstack_features: int = 0  # decoder layer i < deepstack_features adds feature i
    recompute_nodes: tuple[str, ...] = ()  # of schedule nodes, see loongplug.schedule

    def __post_init__(self) -> None:
        """Megatron's, but for one check: its overlapped schedule may be verified in fp32."""
        bf16 = self.bf16
        fp32 = not bf16 and not self.fp16
        self.bf16 = bf16 or (fp32 and self.overlap_moe_expert_parallel_comm)
        super().__post_init__()
        self.bf16 = bf16


class TextDecoder(GPTModel):
    """One pipeline stage (or virtual chunk) of the decoder.

    Text is always embedded here, from input ids; vision features take the visual tokens' places
    afterwards, so that a text embedding's gradient is the same in every layout.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layer_specs: TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        rotary_base: float,
        rope_axes: Tensor,
        visual_token_ids: tuple[int, ...],
        share_embeddings_and_output_weights: bool,
        pre_process: bool,
        post_process: bool,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            position_embedding_type="mrope",
            rotary_base=rotary_base,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        assert config.mrope_section is not None
        assert config.kv_channels is not None
        self.rotary_pos_emb = MultimodalRotary(
            kv_channels=config.kv_channels,
            base=rotary_base,
            axes=rope_axes,
            dtype=config.params_dtype,
        )
        self.visual_token_ids = visual_token_ids

    def share_of(self, features: VisionFeatures, input_ids: Tensor) -> VisionFeatures:
        """What this rank needs of features that all ranks of the tensor parallel group have.

        Collective in the backward pass: that group, with sequence parallelism.
        """
        if not self.config.sequence_parallel:
            return features
        _, position = visual_positions(input_ids, self.visual_token_ids)
        mine = self._in_my_part(position, length=input_ids.shape[1])
        return share_of(features, mine=mine, group=self.pg_collection.tp)

    def embed(self, input_ids: Tensor, features: VisionFeatures | None) -> Tensor:
        """The first layer's input: text embeddings, vision features in place, deepstack stacked.

        Collective: the tensor parallel group (vocabulary-parallel embedding).

        Args:
            input_ids: [b, s] int64.
            features: of the visual tokens in this rank's part of the sequence, which is all of it
                without sequence parallelism. None only for a model without an image encoder.

        Returns:
            [(1 + deepstack features) * s / tp, b, hidden] with sequence parallelism, s without.
        """
        # [s, b, hidden], or [s / tp, b, hidden] with sequence parallelism
        hidden_states = self.embedding(input_ids=input_ids, position_ids=None)
        if features is None:
            return hidden_states
        sample, position = visual_positions(input_ids, self.visual_token_ids)
        if self.config.sequence_parallel:
            mine = self._in_my_part(position, length=input_ids.shape[1])
            sample, position = sample[mine], position[mine] % hidden_states.shape[0]
        nothing = hidden_states.new_zeros(hidden_states.shape)
        streams = [
            place(target, feature, sample=sample, position=position)
            for target, feature in (
                (hidden_states, features.embeddings),
                *((nothing, feature) for feature in features.deepstack),
            )
        ]
        return stack_features(streams[0], streams[1:])

    def first_input(
        self, input_ids: Tensor | None, features: VisionFeatures | None
    ) -> Tensor | None:
        """What this stage's first layer is fed: see :meth:`embed`; None behind the first stage."""
        if not self.pre_process:
            return None
        assert input_ids is not None, "the first stage embeds the text"
        return input_for_recompute(self.embed(input_ids, features), layers=self.decoder)

    def kinds_of(
        self,
        position_ids: Tensor,
        loss_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor | None:
        """What routers have to know of the microbatch's tokens, [b, 2 * s] bool, where they do."""
        if loss_mask is None or not self.training or not balances(self.config):
            return None
        return token_kinds(position_ids, loss_mask, packed=packed_seq_params)

    def _in_my_part(self, position: Tensor, *, length: int) -> Tensor:
        """Which places of a sequence are in the part that this rank holds, as bool."""
        group = self.pg_collection.tp
        part = length // group.size()
        return position.div(part, rounding_mode="floor") == group.rank()

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        *,
        features: VisionFeatures | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """This stage's forward, as GPTModel's.

        Args:
            input_ids: [b, s] int64, on the first stage.
            position_ids: [3, b, s] int64, on every stage.
            features: on the first stage, the unit's vision features (see :meth:`embed`).
            labels: [b, s] int64, on the last stage.
            loss_mask: [b, s] float32; on every stage where experts have balancing losses.
            packed_seq_params: of a pack (b = 1), on every stage: the segments that cover the row.

        Returns:
            on the last stage the loss of every token [b, s] float32 (or logits [b, s, vocab / tp]
            without labels), elsewhere the hidden states for the next stage.
        """
        return super().forward(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=self.first_input(input_ids, features),
            labels=labels,
            padding_mask=self.kinds_of(
                position_ids, loss_mask, packed_seq_params=packed_seq_params
            ),
            packed_seq_params=packed_seq_params,
            **kwargs,
        )
