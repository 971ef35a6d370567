"""A model's small likeness: the same modules and layout constraints, a few thousand parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from loongplug.models.architecture import (
    EncoderArchitecture,
    MultimodalArchitecture,
    MultimodalTextArchitecture,
    TextArchitecture,
    VisionArchitecture,
)
from loongplug.models.audio_transformer import AudioTransformerConfig
from loongplug.models.entries import encoders
from loongplug.verify.tiny_processor import MEL_BINS, SECONDS, FixedImages, Kind, write_processor

# As few tokens as images of their own sizes have.
_FIXED = {"llava": FixedImages(side=16), "internvl": FixedImages(side=16, patch_size=4)}
# Of the longest tiny row. It just fits, so that media lie in several parts of a split sequence.
_TOKENS: Mapping[Kind, int] = {
    "qwen3_vl": 39,
    "qwen2_5_vl": 39,
    "llava": 49,
    "internvl": 69,
    "qwen2_audio": 96,
    "qwen2_5_omni": 72,
}
_SETTINGS = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}
_HEAD = 16  # channels of a head, in both modules
_HIDDEN, _FFN, _EXPERT_FFN = 48, 96, 40
_EXPERTS = 8
_STATES_IN_A_SECOND = 50
_WINDOW = 25  # half the frames of a chunk: a sound of a second has several


def media_of(model: MultimodalArchitecture) -> set[str]:
    """The kinds of media that the model takes."""
    return {medium for entry in encoders(model.entries()) for medium in entry.media}


def kind_of(model: MultimodalArchitecture) -> Kind:
    """The kind of processor that a likeness of ``model`` takes."""
    media = media_of(model)
    if "audio" in media:
        return "qwen2_5_omni" if "image" in media else "qwen2_audio"
    for encoder in map(model.encoder, model.encoders):
        if isinstance(encoder, VisionArchitecture) and encoder.one_size:
            return "llava" if encoder.spatial_merge_size == 1 else "internvl"
    return "qwen3_vl" if model.video_style().timestamps else "qwen2_5_vl"


def write_processor_of(model: MultimodalArchitecture, folder: Path) -> None:
    """Write the processor's folder of a likeness of ``model``."""
    kind = kind_of(model)
    write_processor(folder, kind, fixed=_FIXED.get(kind))


def longest_row(model: MultimodalArchitecture) -> int:
    """Tokens of the longest tiny row, for a likeness of ``model``."""
    return _TOKENS[kind_of(model)]


@dataclass(frozen=True, kw_only=True)
class TinyLayout:
    """What a layout asks of a model's sizes; ``first`` and ``last``: ends with other layers."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    encoder_tp: int = 1
    first: bool = False
    last: bool = False


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How many decoder layers the small likeness has, and its uneven ends have."""

    layers: int
    first: int | None = None
    last: int | None = None


def tiny_stages(layout: TinyLayout, *, taps: int) -> Stages:
    """The fewest decoder layers that fill the pipeline and reach beyond the deepstack features.

    Uneven ends hold one layer in each virtual stage, all other stages two.
    """
    first, last, vpp = layout.first, layout.last, layout.vpp
    if not first and not last:
        return Stages(layers=up(max(2, taps + 1), layout.pp * vpp))
    layers = vpp * (2 * layout.pp - first - last)
    return Stages(layers=layers, first=vpp if first else None, last=vpp if last else None)


def tiny_sizes(
    model: MultimodalArchitecture, layout: TinyLayout, *, vocabulary: int, tiny_media: bool
) -> dict[str, Any]:
    """Sizes of the likeness by their keys; with ``tiny_media``, for a tiny processor's media."""
    sizes: dict[str, Any] = {}
    text = _decoder(model.foundation, layout)
    for name in model.encoders:
        encoder = model.encoder(name)
        own: dict[str, Any] = {}  # one of a kind that is not known here stays as it is
        if isinstance(encoder, VisionArchitecture):
            own = _sees(encoder, layout, tiny_media=tiny_media)
        elif isinstance(encoder, AudioTransformerConfig):
            own = _hears(encoder, layout, out=text["hidden_size"], tiny_media=tiny_media)
        own |= _in_stages(encoder, own)
        sizes |= {f"{model.keys[name]}.{key}": value for key, value in own.items()}
    decoder = text | {
        "num_layers": tiny_stages(layout, taps=model.taps()).layers,
        "vocab_size": up(vocabulary, layout.tp),
    }
    return sizes | {f"foundation.{key}": value for key, value in decoder.items()}


def _in_stages(encoder: EncoderArchitecture, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """A layer or more for each pipeline stage; uneven ones stay so."""
    given, stages = encoder.stage_layers, encoder.pipeline_model_parallel_size
    if (given is None and stages == 1) or "num_layers" not in sizes:  # in one piece
        return {}
    behind = encoder.num_layers > encoder.computed_layers
    computed = sizes["num_layers"] - behind
    if given is None:
        return {"num_layers": max(computed, stages) + behind}
    each = [1 + (size > min(given)) for size in given]
    each[0] += max(0, computed - sum(each))
    return {"num_layers": sum(each) + behind, "stage_layers": each}


def _layers(split: int) -> dict[str, Any]:
    """Two layers of an encoder whose widths are split so."""
    sizes = {"num_attention_heads": up(4, split), "hidden_size": up(4, split) * _HEAD}
    return sizes | {"ffn_hidden_size": up(_FFN, split), "num_layers": 2}


def _hears(
    encoder: AudioTransformerConfig, layout: TinyLayout, *, out: int, tiny_media: bool
) -> dict[str, Any]:
    """``out`` is the decoder's width, which some encoders have in their files."""
    split = lcm(layout.tp, layout.encoder_tp)
    sizes = _layers(split)
    if tiny_media:
        sizes |= {"mel_bins": MEL_BINS, "max_positions": SECONDS * _STATES_IN_A_SECOND}
    if getattr(encoder, "n_window", None) is not None:
        sizes |= {"n_window": _WINDOW, "output_dim": out}
    return sizes


def _sees(encoder: VisionArchitecture, layout: TinyLayout, *, tiny_media: bool) -> dict[str, Any]:
    split = lcm(layout.tp, layout.encoder_tp)  # the projector may keep the decoder's
    sizes = _layers(split)
    if encoder.ffn_hidden_size % encoder.hidden_size == 0:  # some families have it as a factor
        sizes["ffn_hidden_size"] = 2 * sizes["hidden_size"]
    if encoder.one_size:
        behind = min(1, encoder.num_layers - encoder.computed_layers)  # what only travels, too
        sizes |= {"num_layers": 2 + behind, "feature_layer": -1 - behind}
        if tiny_media:
            merges = encoder.spatial_merge_size > 1
            images = _FIXED["internvl" if merges else "llava"]
            sizes |= {"image_size": images.side, "patch_size": images.patch_size}
            sizes |= {"spatial_merge_size": 2} if merges else {}
    elif tiny_media:
        sizes |= {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    taps = getattr(encoder, "deepstack_layers", None)
    if taps is not None:  # the last layer's output is not among them
        sizes |= {"num_layers": max(2, len(taps) + 1), "deepstack_layers": list(range(len(taps)))}
    if getattr(encoder, "num_position_embeddings", None) is not None:
        sizes["num_position_embeddings"] = 64
    full = getattr(encoder, "full_attention_layers", None)
    if full is not None:  # windows before each of two full layers, where the model has windows
        windows = len(full) < encoder.num_layers
        sizes |= {
            "num_layers": 4 if windows else 2,
            "full_attention_layers": [1, 3] if windows else [0, 1],
            # One merged token wide, so that small images have several.
            "window_size": sizes.get("patch_size", encoder.patch_size)
            * sizes.get("spatial_merge_size", encoder.spatial_merge_size),
        }
    if getattr(encoder, "settings", None) is None:
        return sizes
    # Of an encoder of transformers: its settings have all sizes but these, some by other names.
    own = {"feature_layer": sizes.pop("feature_layer")}
    return own | {f"settings.{_SETTINGS.get(key, key)}": value for key, value in sizes.items()}


def _decoder(text: TextArchitecture, layout: TinyLayout) -> dict[str, Any]:
    groups = up(2, layout.tp)
    heads = groups * (2 if text.num_attention_heads > text.num_query_groups else 1)
    filled = text.num_attention_heads * text.kv_channels == text.hidden_size
    sizes: dict[str, Any] = {
        "num_query_groups": groups,
        "num_attention_heads": heads,
        "kv_channels": _HEAD,
        # Some families fix it at what the heads fill; in others the two differ.
        "hidden_size": heads * _HEAD if filled else up(_HIDDEN, layout.tp),
        "ffn_hidden_size": up(_FFN, layout.tp),
    }
    if isinstance(text, MultimodalTextArchitecture):
        sizes["mrope_section"] = _sections(text.mrope_section)
    experts: int | None = getattr(text, "num_experts", None)
    if experts is not None:
        per_token: int = text.experts_per_token  # type: ignore[attr-defined]
        width = up(_EXPERT_FFN, layout.etp)
        while sizes["hidden_size"] in (width, 2 * width):  # square, transformers cannot turn them
            width += layout.etp
        sizes |= {
            "num_experts": up(min(experts, _EXPERTS), layout.ep),
            "experts_per_token": min(per_token, 2),
            "expert_ffn_hidden_size": width,
        }
        if getattr(text, "shared_expert_ffn_hidden_size", None) is not None:
            sizes["shared_expert_ffn_hidden_size"] = up(_EXPERT_FFN, layout.tp)
    return sizes


def _sections(sections: tuple[int, int, int]) -> list[int]:
    """The rotary sections in the same proportions, over half of a head's channels."""
    pairs, total = _HEAD // 2, sum(sections)
    height, width = (section * pairs // total for section in sections[1:])
    return [pairs - height - width, height, width]


def up(number: int, divisor: int) -> int:
    """The first multiple of ``divisor`` that is not below ``number``.

    >>> up(7, 4), up(8, 4)
    (8, 8)
    """
    return -(-number // divisor) * divisor


def as_overrides(sizes: Mapping[str, Any]) -> list[str]:
    """The sizes as overrides of a command line."""
    return [f"model.{key}={str(value).replace(' ', '')}" for key, value in sizes.items()]
