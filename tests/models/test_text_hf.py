"""The decoders of text in config.json and in the names of files: read, written, refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_batches import TOKEN_IDS
from hf_models import trusted
from tiny_text import DECODERS, PACKAGE, described, with_decoder

from loongplug.models.hf_config import hf_config, hf_config_differences, read_folder
from loongplug.models.parts import dotted
from loongplug.models.registry import families
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.training.typed import Filler

pytestmark = pytest.mark.quick

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def published(
    sizes: tuple[int, int, int], heads: tuple[int, int], *, theta: float, **more: Any
) -> dict[str, Any]:
    """config.json of a published text model: hidden size, MLP and layers, heads and key heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    of_heads = ("num_attention_heads", "num_key_value_heads")
    return {
        **dict(zip(names, sizes, strict=True)),
        **dict(zip(of_heads, heads, strict=True)),
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": theta,
        "vocab_size": 151936,
        **more,
    }


EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    # Llama 3.1 8B
    "llama": published(
        *((4096, 14336, 32), (32, 8)),
        theta=500000.0,
        attention_bias=False,
        mlp_bias=False,
        rms_norm_eps=1e-05,
        rope_scaling={**LLAMA3, "rope_type": "llama3"},
        vocab_size=128256,
    ),
    # with the heads of NeMo
    "mistral": published(
        (5120, 14336, 32), (32, 8), theta=1e6, head_dim=128, sliding_window=None, vocab_size=32768
    ),
    # Qwen2.5 7B
    "qwen2": published(
        (3584, 18944, 28), (28, 4), theta=1e6, sliding_window=131072, use_sliding_window=False
    ),
    # 0.6B
    "qwen3": published(
        *((1024, 3072, 28), (16, 8)),
        theta=1000000,
        attention_bias=False,
        head_dim=128,
        rope_scaling=None,
        use_sliding_window=False,
    ),
    # 30B-A3B
    "qwen3_moe": published(
        *((2048, 6144, 48), (32, 4)),
        theta=1e6,
        attention_bias=False,
        head_dim=128,
        sliding_window=None,
        use_sliding_window=False,
        **EXPERTS,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    with trusted(PACKAGE):
        yield


def folder_of(folder: Path, kind: str, **changes: Any) -> Path:
    """A folder whose config.json has the published one as its section for text, changed."""
    content = TOKEN_IDS | {
        "model_type": f"composed_{kind}",
        "text_config": {"model_type": kind} | PUBLISHED[kind] | changes,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def read(folder: Path, kind: str) -> Any:
    """The decoder's config as it comes from the folder."""
    family = families([PACKAGE])[f"composed_{kind}"]
    data = read_folder(folder, family)["foundation"]
    text_class = family.joined["text_decoder"][0].config_class
    assert data["_target_"] == dotted(text_class)
    filler = Filler(resolve=lambda name: text_class, origin=lambda key: key)
    found = filler.fill(text_class, data, key="foundation")
    assert filler.problems == []
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_comes_back_from_its_config_json(tmp_path: Path, name: str) -> None:
    model = with_decoder(DECODERS[name])
    ours = described(model)
    hf_config(ours).save_pretrained(tmp_path)
    kind, _, _ = name.partition("-")
    assert read(tmp_path, kind) == DECODERS[name]
    assert hf_config_differences(tmp_path, ours) == []


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_published_form_is_read(tmp_path: Path, kind: str) -> None:
    text = read(folder_of(tmp_path, kind), kind)
    expected = (500_000.0, Llama3Scaling(**LLAMA3)) if kind == "llama" else (1_000_000.0, None)
    assert text.kv_channels == 128
    assert (text.rotary_base, text.rope_scaling) == expected
    given = PUBLISHED[kind]
    assert text.num_query_groups == given["num_key_value_heads"]
    assert text.layernorm_epsilon == given["rms_norm_eps"]
    assert getattr(text, "sliding_window", None) is None
    if kind == "qwen3_moe":
        assert (text.num_experts, text.experts_per_token, text.expert_ffn_hidden_size) == (
            *(128, 8),
            768,
        )
    assert hf_config_differences(tmp_path, described(with_decoder(text))) == []


def test_a_window_is_transformers_own_where_nothing_is_said(tmp_path: Path) -> None:
    folder_of(tmp_path, "mistral")
    content = json.loads((tmp_path / "config.json").read_text())
    del content["text_config"]["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read(tmp_path, "mistral").sliding_window == 4096


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
HALF = {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "text_config.attention_bias True, expected False"),
    ("llama", {"mlp_bias": True}, "text_config.mlp_bias True, expected False"),
    ("llama", {"hidden_act": "gelu"}, "text_config.hidden_act gelu, expected silu"),
    ("llama", {"rope_scaling": HALF}, "'partial_rotary_factor': 0.5"),
    ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor': 0.5"),
    ("llama", {"rope_scaling": YARN}, "'rope_type': 'yarn'"),
    ("qwen2", {"rope_scaling": YARN}, "'rope_type': 'yarn'"),
    (
        "mistral",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "'rope_type': 'linear'",
    ),
    ("qwen2", {"use_sliding_window": True}, "text_config.use_sliding_window True, expected F"),
    ("qwen3", {"use_sliding_window": True}, "text_config.use_sliding_window True, expected F"),
    ("qwen3", {"attention_bias": True}, "text_config.attention_bias True, expected False"),
    ("qwen3_moe", {"norm_topk_prob": False}, "text_config.norm_topk_prob False, expected True"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, "text_config.mlp_only_layers [3], expected []"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "text_config.decoder_sparse_step 2, expected 1"),
]


@pytest.mark.parametrize(("kind", "changes", "said"), REFUSED)
def test_what_a_decoder_cannot_do_is_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    text = read(folder_of(tmp_path, kind, **changes), kind)
    (difference,) = hf_config_differences(tmp_path, described(with_decoder(text)))
    found, _, expected = difference.partition(", expected ")
    assert found.startswith("config.json has text_config.")
    key, _, value = said.partition(", expected ")
    assert key in found
    assert (value or "'rope_type': ") in expected


def test_dynamic_scaling_travels_and_turns_as_plain_rope(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    text = read(folder_of(tmp_path, "qwen2", rope_scaling=dynamic), "qwen2")
    assert text.dynamic_rope_factor == 2.0
    assert text.rope() == replace(text, dynamic_rope_factor=None).rope()
    again = described(with_decoder(text))
    assert hf_config_differences(tmp_path, again) == []
    rope = hf_config(again).text_config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("dynamic", 2.0)
    for other in (None, 3.0):
        changed = described(with_decoder(replace(text, dynamic_rope_factor=other)))
        (difference,) = hf_config_differences(tmp_path, changed)
        assert "text_config.rope_parameters {" in difference


@pytest.mark.parametrize(
    "change", [{"factor": 4.0}, {"low_freq_factor": 2.0}, {"original_max_position_embeddings": 64}]
)
def test_another_scaling_than_the_folder_s_is_seen(
    tmp_path: Path, change: dict[str, float]
) -> None:
    text = read(folder_of(tmp_path, "llama"), "llama")
    for scaling in (None, replace(text.rope_scaling, **change)):
        other = described(with_decoder(replace(text, rope_scaling=scaling)))
        (difference,) = hf_config_differences(tmp_path, other)
        assert "text_config.rope_parameters {" in difference


def test_llama_s_heads_divide_its_width_in_transformers() -> None:
    odd = described(with_decoder(replace(DECODERS["llama"], hidden_size=68)))
    with pytest.raises(ValueError, match=r"hidden_size is 68, .* multiple of num_attention_hea"):
        hf_config(odd)
