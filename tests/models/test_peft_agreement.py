"""Adapters: logits, loss and gradients against ``peft`` on the model in transformers.

Both load one folder of adapters with random values. What is compared beside logits and loss is the
gradient of every adapter: where ours is one linear and theirs several with the same ``A``, ours is
the sum of theirs.
"""

import dataclasses
from functools import cache

import pytest
import torch
from hf_models import Layout, reference_model
from hf_reference import Reference, Step, assert_agrees, reference_step
from peft import PeftModel
from tiny_families import (
    QWEN2_5_VL,
    QWEN2_AUDIO,
    QWEN3_VL,
    QWEN3_VL_MOE,
    SP,
    Family,
    hearing,
    ragged,
    tied,
)

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.lora import LoraSettings
from loongplug.models.lora.mapping import AdapterTable, adapter_table
from loongplug.models.registry import family_of
from loongplug.verify.weights import write_random_adapters

ALL_THREE = {
    "image_encoder": LoraSettings(rank=3, alpha=3.0),
    "image_projector": LoraSettings(rank=2, alpha=6.0),
    "foundation": LoraSettings(rank=4, alpha=2.0),
}
ATTENTION = LoraSettings(rank=4, target_modules=("linear_qkv", "self_attention.linear_proj"))


def adapted(
    model: VisionLanguageArchitecture, settings: dict[str, LoraSettings]
) -> VisionLanguageArchitecture:
    """``model`` with adapters; a module without any is frozen."""
    frozen = {*model.keys.values()} - settings.keys()
    parts = {
        name: dataclasses.replace(getattr(model, name), lora=lora)
        for name, lora in settings.items()
    } | {name: dataclasses.replace(getattr(model, name), freeze=True) for name in frozen}
    return dataclasses.replace(model, **parts)


OF_SOUNDS = {name.replace("image", "audio"): settings for name, settings in ALL_THREE.items()}
# The first is tied, for that stages share the frozen embedding then.
MODELS = {
    "qwen3_vl": Family(adapted(tied(QWEN3_VL), ALL_THREE)),
    "qwen3_vl-text": Family(adapted(QWEN3_VL, {"foundation": ATTENTION})),
    "qwen2_5_vl": Family(adapted(QWEN2_5_VL, ALL_THREE), ragged),
    "qwen2_audio": hearing(adapted(QWEN2_AUDIO, OF_SOUNDS)),
    "experts": Family(adapted(QWEN3_VL_MOE, ALL_THREE)),
}
TP2_PP2 = Layout(tp=2, pp=2, sequence_parallel=True, recompute=True, micro_batch_size=2)
CASES = [
    ("qwen3_vl", Layout(micro_batch_size=4)),
    ("qwen3_vl", Layout(tp=2)),
    ("qwen3_vl", TP2_PP2),
    ("qwen3_vl", Layout(pp=2, vpp=2, dp=2, overlap_grad_reduce=True)),
    ("qwen3_vl-text", TP2_PP2),
    ("qwen2_5_vl", Layout(tp=2, pp=2, sequence_parallel=True)),
    ("qwen2_audio", Layout(tp=2, pp=2)),
    ("experts", Layout(**SP, etp=1, ep=2)),
    ("experts", Layout(dp=2, **SP, ep=2)),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """What peft makes of a model, by its name, made once; adapters lie beside its weights."""

    @cache
    def of(name: str) -> Reference:
        family, folder = MODELS[name], tmp_path_factory.mktemp(name)
        model, data = family.model, family.data()
        plain = reference_model(model)
        plain.save_pretrained(folder / "hf")
        table = adapter_table(model, family_of(model).load_hugging_face(model))
        write_random_adapters(folder / "adapters", table, seed=1)
        wrapped = PeftModel.from_pretrained(plain, folder / "adapters", is_trainable=True)
        step = reference_step(wrapped, data, arguments=family.arguments)
        return Reference(model, folder / "hf", data, with_our_gradients(step, table))

    return of


def with_our_gradients(step: Step, table: AdapterTable) -> Step:
    theirs = {name.replace(".default.", "."): grad for name, grad in step.gradients.items()}
    expected, used = {}, set()
    for bundle in table.mapping.bundles():
        for source in bundle.sources:
            names = table.file_names(bundle, source)
            used |= set(names)
            total = torch.stack([theirs[name] for name in names]).sum(0)
            expected[source.name] = table.from_file(source, total)
    assert used == theirs.keys()  # and nothing else trains in peft's model
    return Step(loss=step.loss, logits=step.logits, gradients=expected)


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: str(value))
def test_step_agrees_with_peft(references, name, layout):
    expected = references(name)
    adapters = expected.folder.parent / "adapters"
    assert_agrees(expected, layout, adapters=adapters)
    for file in ("adapter_model.safetensors", "adapter_config.json"):  # from any layout
        assert (adapters / "again" / file).read_bytes() == (adapters / file).read_bytes()
