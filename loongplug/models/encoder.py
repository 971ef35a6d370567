"""What encoders share: their Megatron config, pipeline stages on ranks of their own, the smallest
unit, and parameters that do not train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Self

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal
from torch import Tensor, nn

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.hf_mapping import Shape, leading_axes, parameter_name
from loongplug.models.layers.specs import Backend


def encoder_config(
    architecture: EncoderArchitecture, *, decoder: TransformerConfig, tp: int, **family: Any
) -> TransformerConfig:
    """The encoder's Megatron config: its own architecture and ``tp``, the decoder's precision.

    ``family`` is what one family's encoders have in common, such as the norm and the activation.
    No sequence parallelism: an image's patches need not divide by tp. Stages are its own: beside
    the decoder it has one.
    """
    init_method = init_method_normal(architecture.initializer_range)
    return TransformerConfig(
        num_layers=architecture.computed_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        add_bias_linear=True,
        add_qkv_bias=True,
        layernorm_epsilon=architecture.layernorm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=init_method,
        output_layer_init_method=init_method,
        # torch.compile would compile it again for other numbers of rows; nothing is dropped.
        bias_dropout_fusion=False,
        # RotarySelfAttention turns queries and keys itself; upstream's rope is never reached.
        apply_rope_fusion=False,
        tensor_model_parallel_size=tp,
        params_dtype=decoder.params_dtype,
        fp16=decoder.fp16,
        bf16=decoder.bf16,
        use_cpu_initialization=decoder.use_cpu_initialization,
        perform_initialization=decoder.perform_initialization,
        gradient_accumulation_fusion=decoder.gradient_accumulation_fusion,
        attention_backend=decoder.attention_backend,
        deterministic_mode=decoder.deterministic_mode,
        recompute_granularity="full" if architecture.recompute else None,
        recompute_method="uniform" if architecture.recompute else None,
        recompute_num_layers=1 if architecture.recompute else None,
        **_in_stages(architecture.layers_of_stages, dtype=decoder.params_dtype),
        **family,
    )


def _in_stages(sizes: Sequence[int], *, dtype: torch.dtype) -> dict[str, Any]:
    """Stages in Megatron's config, which wants a decoder's first and last module named."""
    if len(sizes) == 1:
        return {}
    layout = [["decoder"] * size for size in sizes]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return {
        "pipeline_model_parallel_size": len(sizes),
        "pipeline_model_parallel_layout": layout,
        "pipeline_dtype": dtype,
    }


def blank_unit(architecture: EncoderArchitecture, *, device: torch.device) -> MediaInput:
    """The smallest medium there is, all zero."""
    grid = architecture.blank_grid()
    return MediaInput(
        loaded=torch.zeros(prod(grid), architecture.row_values, device=device),
        grids=torch.tensor([grid]),
    )


@dataclass(frozen=True, kw_only=True)
class EncoderStage:
    """One of an encoder's pipeline stages; ``sizes`` are the layers that each of them has."""

    sizes: tuple[int, ...]
    number: int = 0

    @property
    def first(self) -> bool:
        """Whether it is given media, and has what stands before the layers."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it has what stands behind the layers, and the projector."""
        return self.number == len(self.sizes) - 1

    @property
    def layers(self) -> range:
        """The layers of this stage, counted from 0 over the whole encoder."""
        start = sum(self.sizes[: self.number])
        return range(start, start + self.sizes[self.number])


@dataclass(frozen=True, kw_only=True)
class HandedOn:
    """States of a unit that a later stage is given in the place of the media.

    ``grids`` are those of the media, [media, 3] int64 on the host. ``states`` are those that the
    stage before has made, [states, hidden], and ``taps`` the ones behind each tapped layer so far,
    [states, hidden] each.
    """

    grids: Tensor
    states: Tensor
    taps: tuple[Tensor, ...] = ()

    @classmethod
    def unpacked(cls, payload: Tensor, *, grids: Tensor, hidden: int) -> "HandedOn":
        """States and taps of what :func:`packed` made."""
        states, *taps = payload.split(hidden, dim=1)
        return cls(grids=grids, states=states, taps=tuple(taps))


EncoderInput = MediaInput | HandedOn


def packed(states: Tensor, taps: Sequence[Tensor]) -> Tensor:
    """All of a state side by side, as it travels, [states, (1 + taps) * hidden]."""
    return torch.cat([states, *taps], dim=1) if taps else states


def payload_widths(architecture: EncoderArchitecture) -> tuple[int, ...]:
    """The width of what each stage but the last hands on."""
    *boundaries, _ = accumulate(architecture.layers_of_stages)
    taps = [sum(layer < behind for layer in architecture.taps()) for behind in boundaries]
    return tuple((1 + each) * architecture.hidden_size for each in taps)


class StagedEncoder[A: EncoderArchitecture](MegatronModule):
    """A stage of an encoder over packed media, whose transformer layers are Megatron's.

    These are sharded over the tensor parallel group of ``pg_collection``; all else is replicated.
    Every rank of that group enters every forward. Megatron's attention cannot shape zero tokens: an
    empty unit is computed as :meth:`blank_unit`, of which the caller keeps nothing. Beside the
    decoder an encoder has one stage, whatever the decoder has.
    """

    @classmethod
    def build(
        cls,
        architecture: A,
        *,
        decoder: TransformerConfig,
        groups: ProcessGroupCollection,
        backend: Backend,
    ) -> Self:
        """The encoder with the decoder's precision, over ``groups``."""
        config = encoder_config(
            architecture,
            decoder=decoder,
            tp=groups.tp.size(),
            # torch.compile would compile it again for other numbers of rows, and upstream's fused
            # GELU is the tanh approximation.
            bias_activation_fusion=False,
            **cls.megatron_settings(architecture),
        )
        return cls(config, architecture, backend=backend, pg_collection=groups)

    @classmethod
    def megatron_settings(cls, architecture: A) -> dict[str, Any]:
        """Settings of the encoder's Megatron config; ValueError for what the encoder cannot be."""
        raise NotImplementedError

    def __init__(
        self,
        config: TransformerConfig,
        architecture: A,
        *,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        sizes = architecture.layers_of_stages
        number = pg_collection.pp.rank() if len(sizes) > 1 else 0
        self.stage = EncoderStage(sizes=sizes, number=number)

    def blank_unit(self) -> EncoderInput:
        """The unit that stands for an empty one: the smallest medium there is, all zero.

        A later stage is given its states. They need a gradient: layers that are frozen here are
        gone through backward all the same where something before them trains.
        """
        architecture, like = self.architecture, next(self.parameters())
        if self.stage.first:
            return blank_unit(architecture, device=like.device)
        grid, hidden = architecture.blank_grid(), architecture.hidden_size
        size = architecture.states(grid), payload_widths(architecture)[self.stage.number - 1]
        payload = torch.zeros(size, dtype=like.dtype, device=like.device, requires_grad=True)
        return HandedOn.unpacked(payload, grids=torch.tensor([grid]), hidden=hidden)


class Carried(nn.Module):
    """Tensors of an encoder's files by their names there, frozen, zero until a file fills them.

    They are parameters, so that checkpoints, imports and exports have them, and frozen whatever
    anyone asks for: see :func:`loongplug.models.hf_mapping.is_carried`. Every tensor parallel rank
    has them whole. Not to be called.
    """

    def __init__(self, tensors: Mapping[str, Shape]) -> None:
        super().__init__()
        for name, shape in tensors.items():
            values = torch.zeros(shape[leading_axes(shape) :])
            self.register_parameter(parameter_name(name), nn.Parameter(values, requires_grad=False))


def hold_key_bias(bias: Tensor, *, head: int) -> None:
    """Give the keys' part of ``bias``, of fused q, k and v, a gradient of exactly zero.

    Without rope it shifts all scores of a query by the same amount, so it changes nothing.
    Its computed gradient is rounding noise, different in each layout, of which Adam makes full
    steps. Where a model has no such bias it stays at the zeros that it starts with. The bias has q,
    k and v of each head of ``head`` channels in turn.
    """

    def without_keys(gradient: Tensor) -> Tensor:
        apart = gradient.unflatten(0, (-1, 3, head)).clone()  # [heads / tp, q k v, head]
        apart[:, 1] = 0
        return apart.flatten()

    bias.register_hook(without_keys)
