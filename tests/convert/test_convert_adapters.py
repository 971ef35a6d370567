"""Adapters on their way into checkpoints, folders of their own, and the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import MODEL, PP2, TP2, convert_on
from micro.random_folder import write_random_folder
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loongplug.checkpoint.lora_weights import AdapterReader
from loongplug.convert.rank import _give_adapter_dtype
from loongplug.models.lora.mapping import AdapterTable, adapter_table
from loongplug.models.lora.peft_config import read_peft_config
from loongplug.training.config import compose_asked_for, compose_model
from loongplug.training.flags import read_command_line
from loongplug.verify.weights import write_random_adapters

LORA = (
    *("+model.foundation.lora.rank=3", "+model.foundation.lora.alpha=6"),
    "+model.foundation.lora.target_modules=[linear_qkv,mlp.linear_fc1]",
    "+model.image_encoder.lora.rank=2",
)
TEXT, VISION = "model.language_model.layers.0.", "model.visual.blocks.0."


@pytest.fixture(scope="module")
def table() -> AdapterTable:
    composed = compose_model(model_name="qwen3_vl_tiny", overrides=LORA)
    found = adapter_table(composed.config, composed.family.load_hugging_face(composed.config))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folders(table, tmp_path_factory) -> tuple[Path, Path]:
    """A model in bf16, and adapters in fp32."""
    folder = tmp_path_factory.mktemp("published")
    write_random_folder(folder / "hf", model_name="qwen3_vl_tiny")
    write_random_adapters(folder / "adapters", table, seed=1)
    return folder / "hf", folder / "adapters"


def test_through_a_checkpoint_adapters_stay_and_weights_are_merged(folders, tmp_path):
    hf, adapters = folders
    into = ("--device", "cpu", *TP2, "--load-hf", str(hf), "--load-lora", str(adapters))
    convert_on(2, *into, "--save", str(tmp_path / "saved"))
    out = ("--device", "cpu", *PP2, "--load", str(tmp_path / "saved"))
    out += ("--save-hf", str(tmp_path / "merged"), "--save-lora", str(tmp_path / "again"))
    convert_on(2, *out)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (adapters / name).read_bytes()

    base, merged = (load_file(each / "model.safetensors") for each in (hf, tmp_path / "merged"))
    values = load_file(adapters / "adapter_model.safetensors")
    changed = set()
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (values.get(f"{prefix}.lora_{kind}.weight") for kind in "AB")
        expected = weight
        if a is not None:
            changed.add(name)
            scale = 2.0 if "language_model" in name else 1.0
            expected = (weight.float() + scale * b @ a).to(weight.dtype)
        assert merged[name].dtype == weight.dtype
        if a is None:
            assert torch.equal(merged[name], weight), name
        else:
            torch.testing.assert_close(merged[name], expected, rtol=1e-2, atol=1e-6)
            assert (merged[name] == expected).float().mean() > 0.99  # but for sums in another order
    assert {f"{TEXT}self_attn.k_proj.weight", f"{VISION}attn.proj.weight"} <= changed
    assert f"{TEXT}self_attn.o_proj.weight" not in changed


A = "base_model.model.model.language_model.layers.0.self_attn.k_proj.lora_A.weight"


def asked_for(folder: Path, *overrides: str, model: str = "qwen3_vl_tiny") -> Any:
    """The config of a model whose adapters the folder tells."""
    line = read_command_line(["--model-name", model, "--load-lora", str(folder), *overrides])
    return compose_asked_for(line.args, overrides=line.overrides).config


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("qwen3_vl_tiny", LORA),
        ("qwen3_vl_moe_tiny", ("model.foundation.lora.rank=2",)),
        (
            "qwen3_vl_moe_tiny",
            (
                "model.foundation.lora={rank: 2, alpha: 3, target_modules: [linear_fc2]}",
                "model.image_projector.lora={rank: 1, target_modules: [merger.linear_fc2]}",
            ),
        ),
    ],
)
def test_a_folder_says_which_adapters_it_has(model, overrides, tmp_path):
    composed = compose_model(model_name=model, overrides=overrides)
    described = composed.family.load_hugging_face(composed.config)
    written = adapter_table(composed.config, described)
    write_random_adapters(tmp_path / "adapters", written, seed=1)
    told = asked_for(tmp_path / "adapters", model=model)
    read = adapter_table(told, described)
    assert [(each.name, each.settings.rank, each.settings.scale) for each in read.linears] == [
        (each.name, each.settings.rank, each.settings.scale) for each in written.linears
    ]
    # What it does not say may be said beside it.
    assert asked_for(tmp_path / "adapters", "model.foundation.lora.dropout=0.1", model=model)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.foundation.lora.rank=4", "an adapter of rank 4 and alpha 6, but has an adapter of"),
        ("model.foundation.lora.alpha=3", "rank 3 and alpha 3, but has an adapter of rank 3 and"),
        ("model.foundation.lora.target_modules=[linear_qkv]", "no adapter, but has an adapter of"),
        ("model.image_projector.lora.rank=2", "rank 2 and alpha 2, but has no adapter in --load"),
    ],
)
def test_what_contradicts_the_folder_is_one_sentence(folders, override, said):
    with pytest.raises(ValueError, match=said) as refused:
        asked_for(folders[1], override)
    assert "\n" not in str(refused.value)
    assert f"{folders[1]}: leave out the model's lora, which the folder says" in str(refused.value)


def test_adapters_of_another_model_are_refused(folders, tmp_path):
    theirs = dict.fromkeys(load_file(folders[1] / "adapter_model.safetensors"))
    others = theirs | {"base_model.model.h.0.c_attn.lora_A.weight": torch.ones(1, 2)}
    folder = changed_folder(folders[1], tmp_path, tensors=others, config={})
    with pytest.raises(ValueError, match="beside no linear of this model"):
        asked_for(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": None}, "gives model.visual.* the rank None and the lora_alpha"),
        ({"lora_alpha": float("nan")}, "the lora_alpha nan, expected a whole number and"),
        ({"use_rslora": True}, "use_rslora is True, which has no counterpart here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"bias": "all"}, "bias is 'all', which has no counterpart"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which has no counterpart"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which has no"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens is \[1, 2\], which"),
        ({"of_a_later_peft": {"on": 1}}, "of_a_later_peft is {'on': 1}, which has no"),
        ({"rank_pattern": {"(w*)*([a-z_.]+)+!": 1}}, r"rank_pattern names '\(w\*\)\*"),
        ({"alpha_pattern": {"q_proj(": 1}}, r"alpha_pattern names 'q_proj\(', expected a mod"),
        ({"alpha_pattern": {"k_proj": 1}}, "proj different ranks or lora_alpha, expected the"),
        (
            {"alpha_pattern": {f"layers.1.mlp.{x}_proj": 1 for x in ("gate", "up")}},
            r"0\.mlp.* and .*1\.mlp",
        ),
        ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern is \['q_proj'\], expected an object"),
    ],
)
def test_what_is_not_plain_is_refused(folders, tmp_path, config, said):
    folder = changed_folder(folders[1], tmp_path, tensors={}, config=config)
    with pytest.raises(ValueError, match=said):
        asked_for(folder)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({A: None}, f"missing {A}"),
        ({"other": torch.ones(2)}, r"extra other \(2,\)"),
        ({A: torch.ones(3, 5)}, r"k_proj.lora_A.weight has shape \(3, 5\), expected"),
    ],
)
def test_other_tensors_are_refused(folders, table, tmp_path, tensors, said):
    folder = changed_folder(folders[1], tmp_path, tensors=tensors, config={})
    with pytest.raises(ValueError, match=said):
        AdapterReader(folder, table)


def test_of_a_file_without_tensors_the_first_that_is_missing_is_told(folders, table, tmp_path):
    nothing = dict.fromkeys(load_file(folders[1] / "adapter_model.safetensors"))
    folder = changed_folder(folders[1], tmp_path, tensors=nothing, config={})
    _give_adapter_dtype([], table, folder)  # which leaves all dtypes as they are
    with pytest.raises(ValueError, match="missing base_model"):
        AdapterReader(folder, table)


def test_adapters_that_are_not_finite_are_refused(folders, table, tmp_path):
    values, b = load_file(folders[1] / "adapter_model.safetensors"), A.replace("lora_A", "lora_B")
    values[b][0, 0] = float("nan")
    reader = AdapterReader(changed_folder(folders[1], tmp_path, tensors=values, config={}), table)
    sources = [source for bundle in table.mapping.bundles() for source in bundle.sources]
    with pytest.raises(ValueError, match=rf"^{b} in .*/adapter_model.safetensors has values that"):
        [reader.whole(source) for source in sources]


def test_what_peft_writes_of_plain_adapters_is_plain(folders, table, tmp_path):
    """All that it knows, at its defaults, and first values that leave the model's weights alone."""
    ours = json.loads((folders[1] / "adapter_config.json").read_text())
    values = load_file(folders[1] / "adapter_model.safetensors")
    for number, init in enumerate((True, False, "gaussian", "orthogonal")):
        theirs = LoraConfig(**ours | {"init_lora_weights": init, "task_type": "CAUSAL_LM"})
        theirs.save_pretrained(tmp_path / str(number))
        shutil.copy(folders[1] / "adapter_model.safetensors", tmp_path / str(number))
        asked_for(tmp_path / str(number), *LORA)
        reader = AdapterReader(tmp_path / str(number), table)
        read = {
            name: table.to_file(source, reader.whole(source))
            for bundle in table.mapping.bundles()
            for source in bundle.sources
            for name in table.file_names(bundle, source)
        }
        assert read.keys() == values.keys()
        for name, tensor in values.items():
            assert torch.equal(read[name], tensor), name


def changed_folder(start: Path, where: Path, *, tensors: dict, config: dict) -> Path:
    folder = where / "changed"
    shutil.copytree(start, folder)
    values = load_file(folder / "adapter_model.safetensors") | tensors
    save_file(
        {k: v for k, v in values.items() if v is not None}, folder / "adapter_model.safetensors"
    )
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_config_that_nests_deeply_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read"):
        read_peft_config(tmp_path)


def test_projections_with_an_a_of_their_own_are_refused(folders, tmp_path):
    shape = load_file(folders[1] / "adapter_model.safetensors")[A].shape
    folder = changed_folder(folders[1], tmp_path, tensors={A: torch.ones(shape)}, config={})
    into = (*MODEL, *LORA, "--load-hf", str(folders[0]), "--load-lora", str(folder))
    with pytest.raises(Exception, match="whose adapter has one A"):
        convert_on(1, *into, "--save-lora", str(tmp_path / "out"))
