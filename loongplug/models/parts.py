"""Parts: the encoders, projectors and decoders that families join, each known by a name."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loongplug.models.architecture import MultimodalTextArchitecture, TextArchitecture

# The same in all decoders; most differ from Megatron's defaults or can be switched by a flag.
_FIXED: dict[str, object] = {
    "group_query_attention": True,
    "qk_l2_norm": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "swiglu": True,
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "add_bias_linear": False,
    "attention_output_gate": False,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "position_embedding_type": "mrope",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "use_rope_scaling": False,
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "experimental_attention_variant": None,
    "encoder_num_layers": None,
    "decoder_num_layers": None,
    "hybrid_layer_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "num_experts": None,
    "mtp_num_layers": None,
    "use_mup": False,
}
# How a token's experts are found: softmax over all, the k highest, made to sum to 1. Megatron gets
# the same from a softmax over the k highest logits, which is its order without "pre softmax".
SOFTMAX_ROUTING: dict[str, object] = {
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_use_upcycling": False,
}
# By the name of an argument, the field of every decoder's config that decides it.
_FIELDS = {
    **{
        name: name
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *("num_query_groups", "kv_channels", "vocab_size", "rotary_base"),
            *("layernorm_epsilon", "max_position_embeddings"),
        )
    },
    "padded_vocab_size": "vocab_size",
    "init_method_std": "initializer_range",
    "untie_embeddings_and_output_weights": "tie_word_embeddings",
}

# As a part's model_type: any that no other part has.
ANY_TYPE = "*"

# By a field of every decoder's and encoder's config, its key in config.json (see Part).
TEXT_JSON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rope_parameters.rope_theta",
    "tie_word_embeddings": "tie_word_embeddings",
}
MULTIMODAL_TEXT_JSON = TEXT_JSON | {"mrope_section": "rope_parameters.mrope_section"}
VISION_JSON = {
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "in_channels": "in_channels",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "initializer_range": "initializer_range",
    "rotary_base": "rope_parameters.rope_theta",
}


@dataclass(frozen=True, kw_only=True)
class ArchitectureArgument:
    """The value of one Megatron argument that the model's YAML decides.

    ``key`` is the YAML key, below ``model``, that an override would set; None where the decoder
    fixes the value.
    """

    value: object
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One encoder, projector or decoder, for any family. Functions are named as "module:function".

    ``config_class`` is the frozen dataclass that its YAML fills, of which ``build`` makes the
    module, and ``hugging_face`` a :class:`~loongplug.models.family.HuggingFacePart`. What each
    is called with is in docs/adding_a_model.md.

    ``config_json`` has, by a field of the config, its key in the section of config.json that
    describes the part, dotted where it is nested. ``derived`` names a function that is given the
    section, as ``transformers`` has it, and gives fields without a key of their own, by name.
    Nothing is computed from the keys in ``unused``: a folder may say anything there.
    ``model_type`` is that of the section, by which a family that takes one of several parts in a
    place knows which a folder has; None for parts whose families take no other, and
    :data:`ANY_TYPE` for one that takes what is left and writes the ``model_type`` itself.
    """

    name: str
    config_class: type
    build: str
    hugging_face: str
    config_json: Mapping[str, str] = field(default_factory=dict)
    derived: str | None = None
    unused: tuple[str, ...] = ()
    model_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderPart(Part):
    """A decoder; its config decides Megatron's arguments for the model.

    ``fixed`` are values of arguments that all its configs have in common. ``keys`` has, by the
    name of an argument, the field of the config that gives it, besides those that every
    :class:`~loongplug.models.architecture.TextArchitecture` has; it wins over ``fixed``.
    """

    build: str = "loongplug.models.decoder:build_decoder"
    fixed: Mapping[str, object]
    keys: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, decoder: TextArchitecture, *, key: str) -> dict[str, ArchitectureArgument]:
        """The decoder's architecture under the names of Megatron's namespace.

        ``key`` is that of the decoder in the model's YAML. The vocabulary is exactly the config's:
        padding would change the checkpoint's shapes.
        """
        multimodal = isinstance(decoder, MultimodalTextArchitecture)
        section = "mrope_section" if multimodal else "kv_channels"
        fields = {**_FIELDS, "mrope_section": section, **self.keys}
        values = {name: getattr(decoder, each) for name, each in fields.items()}
        values["mrope_section"] = list(decoder.rope_section())
        values["untie_embeddings_and_output_weights"] = not decoder.tie_word_embeddings
        return {
            name: ArchitectureArgument(value=value)
            for name, value in {**_FIXED, **self.fixed}.items()
        } | {
            name: ArchitectureArgument(value=values[name], key=f"{key}.{each}")
            for name, each in fields.items()
        }


def load(path: str) -> Any:
    """The object that ``path`` names as "module:attribute"."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path}, which a part of a model names, cannot be loaded ({error}); it is written "
            "module:attribute"
        ) from error


def dotted(config_class: type) -> str:
    """A class by the name that YAML's ``_target_`` has."""
    return f"{config_class.__module__}.{config_class.__qualname__}"
