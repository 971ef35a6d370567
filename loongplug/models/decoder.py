"""The text decoder: Megatron's GPTModel with rope of three axes, features in their places, and a
loss that has the logits of the whole vocabulary in memory once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank
from torch import Tensor

from loongplug.context.token_split import ContextShard
from loongplug.models.architecture import TextArchitecture
from loongplug.models.features import (
    DeepstackTransformerLayer,
    Features,
    PlacedFeatures,
    Places,
    TokenPlaces,
    features_behind,
    place,
    share_of,
    stack_features,
    token_places,
)
from loongplug.models.layers.context.row import ContextRow
from loongplug.models.layers.inputs import MultimodalRotary, PackedSegments, input_for_recompute
from loongplug.models.layers.router import balances, of_whole_rows, token_kinds
from loongplug.models.layers.specs import Backend, decoder_layer_spec, final_norm
from loongplug.models.rope_settings import RopeSettings

# Bytes of float32 values that are made of the logits at a time.
_AT_A_TIME = 1 << 26


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's transformer config plus what the deepstack layers need to know."""

    bf16: bool = False  # Megatron's
    deepstack_features: int = 0  # decoder layer i < deepstack_features adds feature i
    recompute_nodes: tuple[str, ...] = ()  # of schedule nodes, see loongplug.schedule
    # With Megatron's True the host waits for the device at every transfer between stages, for a
    # fault of torch that 1.13 mended: the request's own wait orders the streams.
    batch_p2p_sync: bool = False

    def __post_init__(self) -> None:
        """Megatron's, but for one check: its overlapped schedule may be verified in fp32."""
        bf16 = self.bf16
        fp32 = not bf16 and not self.fp16
        self.bf16 = bf16 or (fp32 and self.overlap_moe_expert_parallel_comm)
        super().__post_init__()
        self.bf16 = bf16


class TextDecoder(GPTModel):
    """One pipeline stage (or virtual chunk) of the decoder.

    Text is always embedded here, from input ids; features take the places of their media's tokens
    afterwards, so that a text embedding's gradient is the same in every layout.
    """

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layer_specs: TransformerBlockSubmodules,
        rope: RopeSettings,
        **options: Any,
    ) -> None:
        """``options`` are GPTModel's."""
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs,
            position_embedding_type="mrope",
            rotary_base=rope.base,
            **options,
        )
        assert config.mrope_section is not None
        assert config.kv_channels == rope.channels
        self.rotary_pos_emb = MultimodalRotary(rope, dtype=config.params_dtype)

    def travelling(self, *, behind: bool) -> int:
        """How many deepstack features come with the hidden states; ``behind``: how many leave."""
        layer = get_transformer_layer_offset(self.config, self.vp_stage, self.pp_group.rank())
        if behind:
            layer += len(self.decoder.layers)
        return features_behind(layer=layer, deepstack=self.config.deepstack_features)

    def token_places(
        self, places: Places, input_ids: Tensor, *, row: ContextRow | None = None
    ) -> TokenPlaces:
        """Places of tokens of media in this rank's part of ``input_ids`` [b, s], on their device.

        ``places`` are those of a unit, which the device is not asked for, in the whole row: the
        ids are of what ``row`` says is held here. No collectives.
        """
        group = self.pg_collection.tp
        split = self.config.sequence_parallel
        return token_places(
            places,
            held=ContextShard.whole(input_ids.shape[1])
            if row is None
            else row.split.parts[row.rank],
            device=input_ids.device,
            part=group.rank() if split else 0,
            parts=group.size() if split else 1,
        )

    def share_of(self, features: Features, places: TokenPlaces) -> Features:
        """This rank's share of features that all ranks of the tensor parallel group have.

        Collective in the backward pass: that group, with sequence parallelism. Ranks that share
        a row by context parallelism each have the gradient of their own tokens' features alone.
        """
        if self.config.sequence_parallel:
            return share_of(features, places=places, group=self.pg_collection.tp)
        if self.config.context_parallel_size > 1:
            return share_of(features, places=places, group=None)
        return features

    def embed(self, input_ids: Tensor, placed: Sequence[PlacedFeatures]) -> Tensor:
        """The first layer's input: text embeddings, features in their places, deepstack stacked.

        Collective: the tensor parallel group (vocabulary-parallel embedding).

        Of ``input_ids`` [b, s] and each encoder's features in this rank's part of the sequence it
        gives [(1 + deepstack features) * s / tp, b, hidden]; without sequence parallelism the part
        is all of it, s.
        """
        # [s, b, hidden], or [s / tp, b, hidden] with sequence parallelism
        hidden_states = self.embedding(input_ids=input_ids, position_ids=None)
        nothing = hidden_states.new_zeros(hidden_states.shape)
        streams = [hidden_states, *[nothing] * self.config.deepstack_features]
        for each in placed:
            # An encoder without deepstack features leaves the streams of others alone.
            for number, feature in enumerate((each.features.embeddings, *each.features.deepstack)):
                streams[number] = place(streams[number], feature, places=each.places)
        return stack_features(streams[0], streams[1:])

    def first_input(
        self, input_ids: Tensor | None, placed: Sequence[PlacedFeatures]
    ) -> Tensor | None:
        """The input of this stage's first layer: see :meth:`embed`; None behind the first stage."""
        if not self.pre_process:
            return None
        assert input_ids is not None, "the first stage embeds the text"
        return input_for_recompute(self.embed(input_ids, placed), layers=self.decoder)

    def router_mask(
        self,
        position_ids: Tensor,
        loss_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor | None:
        """Padding and loss mask of whole rows for routers, [b, 2 * s * cp] bool.

        None for a decoder without experts, and for a pack without padding where nothing is
        balanced. Collective: the context parallel group.
        """
        packed = packed_seq_params
        if self.config.num_moe_experts is None:
            return None
        balanced = loss_mask is not None and self.training and balances(self.config)
        if packed is not None and packed.qkv_format == "thd" and not (packed.padding or balanced):
            return None
        kinds = token_kinds(position_ids, loss_mask if balanced else None, packed=packed)
        return of_whole_rows(kinds, group=self.pg_collection.cp)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Each token's loss [b, s] float32, of ``labels`` [b, s] and ``logits`` [s, b, vocab / tp].

        The backward writes over the logits. Collective: the tensor parallel group.
        """
        if self.config.cross_entropy_loss_fusion:
            return super().compute_language_model_loss(labels, logits)
        loss = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), group=self.pg_collection.tp
        )
        return loss.transpose(0, 1).contiguous()

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        *,
        placed: Sequence[PlacedFeatures] = (),
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """This stage's forward, as GPTModel's; ``input_ids`` and ``placed`` as in :meth:`embed`.

        ``position_ids`` [3, b, s] are given to every stage, ``labels`` [b, s] to the last one,
        ``loss_mask`` [b, s] to every stage where experts have balancing losses, and
        ``packed_seq_params`` of a pack (b = 1), whose segments cover the row, to every stage.

        Returns:
            on the last stage the loss of every token [b, s] float32 (or logits [b, s, vocab / tp]
            without labels), elsewhere the hidden states for the next stage.
        """
        return super().forward(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=self.first_input(input_ids, placed),
            labels=labels,
            padding_mask=self.router_mask(
                position_ids, loss_mask, packed_seq_params=packed_seq_params
            ),
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Minus the logarithm of each label's probability, in float32 (float64 of float64).

    Megatron's own makes a float32 copy of the logits, keeps it for the backward, and makes a
    gradient besides: of 4,096 tokens and 152,000 words in bf16 these are 2.5 and 1.2 GB more. Here
    float32 values are made of a few tokens at a time, and the gradient is written over the logits.
    So nobody may use them once the backward has begun.

    ``logits`` [s, b, vocabulary / tp] are this rank's part, ``labels`` [s, b] of the whole
    vocabulary; the losses [s, b] are the same on all ranks. Collective: the tensor parallel
    ``group``.
    """
    return _CrossEntropy.apply(logits, labels, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = logits.view(-1, logits.size(-1))  # [tokens, vocabulary / tp]
        own = labels.reshape(-1) - dist.get_rank(group) * rows.size(1)
        elsewhere = (own < 0) | (own >= rows.size(1))  # another rank has the label
        own.masked_fill_(elsewhere, 0)
        highest = rows.amax(-1).to(torch.promote_types(rows.dtype, torch.float32))
        if dist.get_world_size(group) > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        found = highest.new_empty(2, len(rows))  # sums of exponentials, and the labels' logits
        for few in _slices(rows):
            shifted = rows[few] - highest[few, None]
            found[1, few] = shifted.gather(1, own[few, None])[:, 0]
            found[0, few] = shifted.exp_().sum(-1)
        found[1].masked_fill_(elsewhere, 0)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(found, group=group)
        logarithms = found[0].log_()
        ctx.save_for_backward(logits, highest + logarithms, own, elsewhere)
        return (logarithms - found[1]).view_as(labels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, normaliser, own, elsewhere = ctx.saved_tensors
        rows, grad = logits.view(-1, logits.size(-1)), grads[0].reshape(-1, 1)
        here = 1 - elsewhere.to(normaliser.dtype)  # 1 where this rank has the label
        tokens = torch.arange(len(rows), device=rows.device)
        for few in _slices(rows):
            values = (rows[few] - normaliser[few, None]).exp_()  # probabilities
            values[tokens[: len(values)], own[few]] -= here[few]
            rows[few] = values.mul_(grad[few])
        return logits, None, None


def _slices(rows: Tensor) -> list[slice]:
    tokens = max(1, _AT_A_TIME // (4 * rows.size(1)))
    return [slice(first, first + tokens) for first in range(0, len(rows), tokens)]


def build_decoder(
    text: TextArchitecture,
    config: DecoderConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
    backend: Backend,
) -> TextDecoder:
    """One stage (or virtual chunk) of ``text``; dense or with experts, as ``config`` says."""
    layer = decoder_layer_spec(
        config,
        backend=backend,
        layer_class=DeepstackTransformerLayer if config.deepstack_features else TransformerLayer,
    )
    count = get_num_layers_to_build(config, vp_stage, get_pg_rank(pg_collection.pp))
    return TextDecoder(
        config,
        layer_specs=TransformerBlockSubmodules(
            layer_specs=[layer] * count, layer_norm=final_norm(config, backend=backend)
        ),
        vocab_size=text.vocab_size,
        max_sequence_length=text.max_position_embeddings,
        rope=text.rope(),
        share_embeddings_and_output_weights=text.tie_word_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
