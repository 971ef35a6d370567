"""Models that hear in and out of Hugging Face: wholes, and adapters as PEFT's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from hf_models import Layout, reference_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from there_and_back import assert_there_and_back
from tiny_families import OMNI
from transformers import (
    AutoModelForMultimodalLM,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)

from loongplug.models.family import HuggingFaceModel
from loongplug.models.lora import LoraSettings
from loongplug.models.lora.mapping import adapter_table
from loongplug.models.registry import family_of
from loongplug.verify.tiny_processor import write_processor
from loongplug.verify.weights import write_random_adapters

OTHERS = {"talker.model.norm.weight": torch.ones(2), "token2wav.code2wav.weight": torch.ones(3)}


def hugging_face(config: Any) -> HuggingFaceModel:
    return family_of(config).load_hugging_face(config)


def whole_folder(folder: Path, source: Path) -> Path:
    """What transformers writes of a whole Qwen2.5-Omni around a thinker; tensors that speak too."""
    section = json.loads((source / "config.json").read_text())
    model = Qwen2_5OmniForConditionalGeneration(
        Qwen2_5OmniConfig(thinker_config=section, enable_audio_output=False)
    )
    loaded = AutoModelForMultimodalLM.from_pretrained(source)
    model.thinker.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | OTHERS, file)
    return folder


def test_a_whole_folder_gives_its_thinker(tmp_path: Path) -> None:
    """Into the thinker's own folder, also where the processor's files are the whole's."""
    thinker = tmp_path / "hf"
    reference_model(OMNI).save_pretrained(thinker)
    whole = whole_folder(tmp_path / "whole", thinker)
    write_processor(whole, "qwen2_5_omni")
    options = {"layout": Layout(), "processor": whole, "original": thinker}
    assert_there_and_back(OMNI, whole, tmp_path / "out", **options)


def test_adapters_have_the_names_of_peft(tmp_path: Path) -> None:
    """Its model takes all of ours, on every linear of encoders, projectors and decoder."""
    reference_model(OMNI).save_pretrained(tmp_path / "hf")
    lora = LoraSettings(rank=2, alpha=3.0)
    adapted = dataclasses.replace(
        OMNI,
        **{key: dataclasses.replace(getattr(OMNI, key), lora=lora) for key in OMNI.keys.values()},
    )
    table = adapter_table(adapted, hugging_face(adapted))
    assert table is not None
    write_random_adapters(tmp_path / "adapters", table, seed=1)
    plain = AutoModelForMultimodalLM.from_pretrained(tmp_path / "hf")
    wrapped = PeftModel.from_pretrained(plain, tmp_path / "adapters")
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    found = {
        name.replace(".default.", "."): value
        for name, value in wrapped.named_parameters()
        if ".lora_" in name
    }
    assert found.keys() == saved.keys()
    for name, value in found.items():
        assert torch.equal(value, saved[name]), name
    for part in ("audio_tower.layers.1.fc2", "self_attn.k_proj", "audio_tower.proj."):
        assert any(part in name for name in found), part
