"""The decoders of text in config.json and in the names of files: read, written, refused."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hf_batches import TOKEN_IDS
from hf_models import trusted
from tiny_text import DECODERS, PACKAGE, described, with_decoder

from loongplug.models.hf_config import hf_config, hf_config_differences, read_folder
from loongplug.models.hf_mapping import Mapping
from loongplug.models.parts import DecoderPart, dotted, load
from loongplug.models.registry import families, family_of
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.training.typed import Filler
from loongplug.verify.tiny_sizes import TinyLayout, tiny_sizes

pytestmark = pytest.mark.quick

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
# The text models' own config.json as published, but for what nothing is computed from.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {  # Llama 3.1 8B
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "mistral": {  # with the heads of NeMo
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "qwen2": {  # Qwen2.5 7B
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3": {  # 0.6B
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_moe": {  # 30B-A3B
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _trusted() -> Iterator[None]:
    with trusted(PACKAGE):
        yield


def folder_of(folder: Path, kind: str, **changes: Any) -> Path:
    """A folder whose config.json has the published one as its section for text, changed."""
    content = TOKEN_IDS | {
        "model_type": f"composed_{kind}",
        "text_config": PUBLISHED[kind] | changes,
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


def decoder_parts() -> dict[str, Any]:
    """Each decoder part of the package, with a config of a model that has it."""
    found = {}
    for name in DECODERS:
        model = with_decoder(DECODERS[name])
        part = family_of(model, trusted_packages=[PACKAGE]).parts_of(model)["text_decoder"]
        assert isinstance(part, DecoderPart)
        found[name] = (part, DECODERS[name])
    return found


def test_the_output_layer_has_the_family_s_name() -> None:
    head = "language_model.lm_head.weight"
    for name, (part, text) in decoder_parts().items():
        describe = load(part.hugging_face)
        names = {"ours": "text_decoder", "theirs": "language_model.model"}
        usual, other = describe(text, **names), describe(text, **names, head=head)
        theirs, ours = (
            Mapping(each.rows, twins=each.twins).sources().keys() for each in (usual, other)
        )
        if text.tie_word_embeddings:
            assert theirs == ours, name
            assert (list(usual.twins), list(other.twins)) == (["lm_head.weight"], [head])
        else:
            assert theirs - ours == {"lm_head.weight"}, name
            assert ours - theirs == {head}, name


def test_megatron_s_section_is_all_time() -> None:
    model = with_decoder(DECODERS["qwen2"])
    found = family_of(model, trusted_packages=[PACKAGE]).megatron_arguments(model)
    section = found["mrope_section"]
    assert (section.value, section.key) == ([11, 0, 0], "foundation.kv_channels")
    assert found["position_embedding_type"].value == "mrope"
    assert found["rotary_base"].value == 10_000.0


def test_a_small_likeness_has_no_section() -> None:
    sizes = tiny_sizes(
        with_decoder(DECODERS["llama"]), TinyLayout(), vocabulary=100, tiny_media=True
    )
    known = {f"foundation.{each.name}" for each in fields(DECODERS["llama"])}
    assert {name for name in sizes if name.startswith("foundation.")} <= known
