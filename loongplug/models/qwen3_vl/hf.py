"""Qwen3-VL on the Hugging Face side: the table of tensor names, and the model's config.json."""

import json
from pathlib import Path
from typing import Any

from loongplug.models.hf_mapping import Mapping, Row, Source, Split
from loongplug.models.qwen3_vl.config import Qwen3VLConfig

_VISION, _VISION_HF = "image_encoder.blocks.layers.{}.", "model.visual.blocks.{}."
_TEXT, _TEXT_HF = "text_decoder.decoder.layers.{}.", "model.language_model.layers.{}."
_HF_EMBEDDING, _HF_HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_WITHOUT_INFLUENCE = ("initializer_range", "max_position_embeddings", "tie_word_embeddings")
_HF_NORM_EPSILON = 1e-6  # transformers has no key for the encoder's and the mergers' norms


def hf_mapping(config: Qwen3VLConfig) -> Mapping:
    """Every parameter of the model and the Hugging Face tensors it corresponds to."""
    rows = [*_encoder(config), *_projector(config), *_decoder(config)]
    # Some files of tied models have the output layer's weight as well.
    twins = {_HF_HEAD: _HF_EMBEDDING} if config.foundation.tie_word_embeddings else {}
    return Mapping(rows, twins=twins)


def _encoder(config: Qwen3VLConfig) -> list[Row]:
    vision = config.image_encoder
    hidden, ffn, count = vision.hidden_size, vision.ffn_hidden_size, vision.num_layers
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    positions = (vision.num_position_embeddings, hidden)
    rows = [
        _row("image_encoder.patch_embed.weight", _hf_patch("weight"), shape=(hidden, *patch)),
        _row("image_encoder.patch_embed.bias", _hf_patch("bias"), shape=(hidden,)),
        _row(
            "image_encoder.position_embedding.weight",
            "model.visual.pos_embed.weight",
            shape=positions,
        ),
    ]
    for kind, width in (("weight", (hidden,)), ("bias", ())):
        qkv = Source(f"{_VISION_HF}attn.qkv.{kind}", (3 * hidden, *width), parts=3)
        rows += [
            _attention_norm(
                _VISION, f"{_VISION_HF}norm1.{kind}", kind=kind, width=hidden, count=count
            ),
            _mlp_norm(_VISION, f"{_VISION_HF}norm2.{kind}", kind=kind, width=hidden, count=count),
            _qkv(_VISION, (qkv,), kind=kind, groups=vision.num_attention_heads, count=count),
        ]
    for ours, theirs, split, shape in (
        ("self_attention.linear_proj", "attn.proj", Split.ROW, (hidden, hidden)),
        ("mlp.linear_fc1", "mlp.linear_fc1", Split.COLUMN, (ffn, hidden)),
        ("mlp.linear_fc2", "mlp.linear_fc2", Split.ROW, (hidden, ffn)),
    ):
        rows += _linear(
            f"{_VISION}{ours}", f"{_VISION_HF}{theirs}", shape=shape, split=split, count=count
        )
    return rows


def _projector(config: Qwen3VLConfig) -> list[Row]:
    vision, out = config.image_encoder, config.foundation.hidden_size
    single = vision.hidden_size
    merged = single * vision.spatial_merge_size**2
    taps = len(vision.deepstack_layers)
    rows: list[Row] = []
    # A deepstack merger norms merged patches, the last layer's merger single ones.
    for ours, theirs, norm, count in (
        ("image_projector.merger", "model.visual.merger", single, None),
        ("image_projector.deepstack.{}", "model.visual.deepstack_merger_list.{}", merged, taps),
    ):
        for kind in ("weight", "bias"):
            names = f"{ours}.norm.{kind}", f"{theirs}.norm.{kind}"
            rows.append(_row(*names, shape=(norm,), count=count))
        for layer, split, shape in (
            ("linear_fc1", Split.COLUMN, (merged, merged)),
            ("linear_fc2", Split.ROW, (out, merged)),
        ):
            rows += _linear(
                f"{ours}.{layer}", f"{theirs}.{layer}", shape=shape, split=split, count=count
            )
    return rows


def _decoder(config: Qwen3VLConfig) -> list[Row]:
    text = config.foundation
    hidden, ffn, count, head = (
        text.hidden_size,
        text.ffn_hidden_size,
        text.num_layers,
        text.kv_channels,
    )
    query, key = text.num_attention_heads * head, text.num_query_groups * head
    vocabulary = (text.vocab_size, hidden)
    attention, mlp = f"{_TEXT_HF}self_attn", f"{_TEXT_HF}mlp"

    # Tied, the last stage's output layer is a second copy of the embedding.
    embedding = "text_decoder.embedding.word_embeddings.weight"
    output = "text_decoder.output_layer.weight"
    tied = text.tie_word_embeddings
    names = (embedding, output) if tied else (embedding,)
    rows = [Row(names, (Source(_HF_EMBEDDING, vocabulary),), Split.COLUMN)]
    if not tied:
        rows.append(_row(output, _HF_HEAD, shape=vocabulary, split=Split.COLUMN))
    qkv = [
        Source(f"{attention}.{part}_proj.weight", (length, hidden))
        for part, length in (("q", query), ("k", key), ("v", key))
    ]
    gate_up = [Source(f"{mlp}.{part}_proj.weight", (ffn, hidden)) for part in ("gate", "up")]
    rows += [
        _attention_norm(
            _TEXT, f"{_TEXT_HF}input_layernorm.weight", kind="weight", width=hidden, count=count
        ),
        _mlp_norm(
            _TEXT,
            f"{_TEXT_HF}post_attention_layernorm.weight",
            kind="weight",
            width=hidden,
            count=count,
        ),
        _qkv(_TEXT, tuple(qkv), kind="weight", groups=text.num_query_groups, count=count),
        Row((f"{_TEXT}mlp.linear_fc1.weight",), tuple(gate_up), Split.COLUMN, count=count),
    ]
    for ours, theirs, split, shape in (
        ("self_attention.q_layernorm", "self_attn.q_norm", Split.NONE, (head,)),
        ("self_attention.k_layernorm", "self_attn.k_norm", Split.NONE, (head,)),
        ("self_attention.linear_proj", "self_attn.o_proj", Split.ROW, (hidden, query)),
        ("mlp.linear_fc2", "mlp.down_proj", Split.ROW, (hidden, ffn)),
    ):
        pair = f"{_TEXT}{ours}.weight", f"{_TEXT_HF}{theirs}.weight"
        rows.append(_row(*pair, shape=shape, split=split, count=count))
    norm = "text_decoder.decoder.final_layernorm.weight"
    rows.append(_row(norm, "model.language_model.norm.weight", shape=(hidden,)))
    return rows


def _hf_patch(kind: str) -> str:
    return f"model.visual.patch_embed.proj.{kind}"


def _row(
    ours: str,
    theirs: str,
    *,
    shape: tuple[int, ...],
    split: Split = Split.NONE,
    count: int | None = None,
) -> Row:
    return Row((ours,), (Source(theirs, shape),), split, count=count)


def _linear(
    ours: str, theirs: str, *, shape: tuple[int, int], split: Split, count: int | None
) -> list[Row]:
    """Weight and bias; a row-split layer adds its bias after the reduction, so it has it whole."""
    bias = Split.COLUMN if split is Split.COLUMN else Split.NONE
    return [
        _row(f"{ours}.weight", f"{theirs}.weight", shape=shape, split=split, count=count),
        _row(f"{ours}.bias", f"{theirs}.bias", shape=shape[:1], split=bias, count=count),
    ]


def _qkv(layer: str, sources: tuple[Source, ...], *, kind: str, groups: int, count: int) -> Row:
    name = f"{layer}self_attention.linear_qkv.{kind}"
    return Row((name,), sources, Split.COLUMN, groups=groups, count=count)


def _attention_norm(layer: str, theirs: str, *, kind: str, width: int, count: int) -> Row:
    names = (
        f"{layer}input_layernorm.{kind}",
        f"{layer}self_attention.linear_qkv.layer_norm_{kind}",
    )
    return Row(names, (Source(theirs, (width,)),), count=count)


def _mlp_norm(layer: str, theirs: str, *, kind: str, width: int, count: int) -> Row:
    names = (f"{layer}pre_mlp_layernorm.{kind}", f"{layer}mlp.linear_fc1.layer_norm_{kind}")
    return Row(names, (Source(theirs, (width,)),), count=count)


def hf_config(config: Qwen3VLConfig) -> Any:
    """The same architecture as a ``transformers`` ``Qwen3VLConfig`` (without dtype).

    The ids of the special tokens must be known: from the YAML or from the tokenizer.

    Raises:
        ValueError: the architecture has something that ``transformers`` cannot express.
    """
    from transformers import Qwen3VLConfig as HFConfig

    for module, epsilon in (
        ("image_encoder", config.image_encoder.layernorm_epsilon),
        ("image_projector", config.image_projector.layernorm_epsilon),
    ):
        if epsilon != _HF_NORM_EPSILON:
            raise ValueError(
                f"{module}.layernorm_epsilon is {epsilon}, but transformers' Qwen3-VL has "
                f"{_HF_NORM_EPSILON} there; only a model with that value can be exchanged with it"
            )
    token_ids = {name: getattr(config, name) for name in _TOKEN_IDS}
    assert None not in token_ids.values(), token_ids
    return HFConfig(
        text_config=_text_config(config),
        vision_config=_vision_config(config),
        **token_ids,
        tie_word_embeddings=config.foundation.tie_word_embeddings,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def hf_config_differences(folder: Path, config: Qwen3VLConfig) -> list[str]:
    """What ``folder``'s config.json says otherwise than ``config``, one line each.

    Tensor shapes alone do not tell, for one, the number of heads. Keys without influence on what
    the weights mean are left out. A folder without config.json has nothing to compare.
    """
    from transformers import Qwen3VLConfig as HFConfig

    path = folder / "config.json"
    if not path.is_file():
        return []
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        return ["config.json is no JSON object; copy the file anew"]
    if kind != HFConfig.model_type:
        return [f"config.json has model_type {kind!r}, expected {HFConfig.model_type!r}"]
    found = HFConfig.from_pretrained(folder, local_files_only=True)
    differences: list[str] = []
    for section, values in (
        ("text_config", _text_config(config)),
        ("vision_config", _vision_config(config)),
    ):
        for key, value in values.items():
            other = getattr(getattr(found, section), key)
            if key == "rope_parameters":
                other = {name: other.get(name, value[name]) for name in value}
            if isinstance(value, list):
                other = list(other)
            if key not in _WITHOUT_INFLUENCE and other != value:
                differences.append(f"config.json has {section}.{key} {other}, expected {value}")
    tied = config.foundation.tie_word_embeddings
    if found.tie_word_embeddings != tied:
        differences.append(
            f"config.json has tie_word_embeddings {found.tie_word_embeddings}, expected {tied}"
        )
    return differences


def _text_config(config: Qwen3VLConfig) -> dict[str, Any]:
    text = config.foundation
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.ffn_hidden_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_query_groups,
        "head_dim": text.kv_channels,
        "hidden_act": "silu",
        "rms_norm_eps": text.layernorm_epsilon,
        "initializer_range": text.initializer_range,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": text.rotary_base,
            "mrope_section": list(text.mrope_section),
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": text.tie_word_embeddings,
    }


def _vision_config(config: Qwen3VLConfig) -> dict[str, Any]:
    vision = config.image_encoder
    return {
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_hidden_size,
        "num_heads": vision.num_attention_heads,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": vision.in_channels,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "num_position_embeddings": vision.num_position_embeddings,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
        "out_hidden_size": config.foundation.hidden_size,
        "initializer_range": vision.initializer_range,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rotary_base},
    }
