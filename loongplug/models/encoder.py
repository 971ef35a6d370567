"""What encoders share: their Megatron config, the smallest unit, and tensors that never train."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal
from torch import nn

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.hf_mapping import Shape, leading_axes, parameter_name


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
    """What Megatron's config has of stages, which wants a decoder's first and last module named."""
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
        rows=torch.zeros(prod(grid), architecture.row_values, device=device),
        grids=torch.tensor([grid]),
    )


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
