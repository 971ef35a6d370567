"""Qwen3-VL-MoE's weights in and out of Hugging Face folders, in every layout."""

import dataclasses

import pytest
import torch
import transformers
from hf_models import Layout, reference_model
from ranks import RankError, model_parallel, run_ranks
from safetensors.torch import load_file, save_file
from there_and_back import assert_there_and_back, in_and_out
from tiny_families import QWEN3_VL_MOE, SP

from loongplug.checkpoint.hf_export import check_hf_export
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.checkpoint.lora_weights import check_adapter_export
from loongplug.models.hf_config import hf_config
from loongplug.models.registry import families
from loongplug.verify.tiny_processor import write_processor

hugging_face = families()["qwen3_vl_moe"].load_hugging_face

FILE = "model.safetensors"
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, **SP),
    Layout(**SP, etp=1),
    Layout(**SP, etp=1, ep=2),
    Layout(dp=2, etp=2),
    Layout(pp=2, **SP),
    Layout(pp=2, vpp=2, dp=2, ep=2),
]


def turned(tensors):
    """Experts the other way round, all else as it is."""
    return {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(EXPERTS) else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The model as transformers writes it: experts are (outputs, inputs)."""
    folder = tmp_path_factory.mktemp("saved")
    reference_model(QWEN3_VL_MOE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def published(saved, tmp_path_factory):
    """The same as the published files are: experts are (inputs, outputs)."""
    folder = tmp_path_factory.mktemp("published")
    tensors = turned(load_file(saved / FILE))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_there_and_back_to_the_same_bits(published, processor, tmp_path, layout):
    given = {"layout": layout, "processor": processor}
    read = assert_there_and_back(QWEN3_VL_MOE, published, tmp_path / "out", **given)
    assert read == sum(each.nbytes for each in load_file(published / FILE).values())


def test_what_transformers_writes_is_read_as_well_and_written_as_published(
    saved, published, processor, tmp_path
):
    given = {"layout": Layout(dp=2, ep=2, **SP), "processor": processor, "original": published}
    assert_there_and_back(QWEN3_VL_MOE, saved, tmp_path / "out", **given)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    found, expected = model.state_dict(), reference_model(QWEN3_VL_MOE).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_expert_too_few_is_named_with_both_shapes(published, processor, tmp_path):
    tensors = load_file(published / FILE)
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][:7].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    arguments = {"model": QWEN3_VL_MOE, "source": tmp_path, "target": tmp_path / "out"}
    arguments["processor"] = processor
    with pytest.raises(RankError, match=r"\(7, 48, 64\), expected \(8, 48, 64\)"):
        run_ranks(in_and_out, 2, layout=Layout(dp=2, ep=2), **arguments)


@pytest.mark.quick
@pytest.mark.parametrize("ffn", [32, 64])
def test_square_experts_are_not_written(ffn):
    """transformers could not tell inputs from outputs."""
    model = QWEN3_VL_MOE
    square = dataclasses.replace(model.foundation, expert_ffn_hidden_size=ffn)
    with pytest.raises(ValueError, match="square matrices"):
        hf_config(hugging_face(dataclasses.replace(model, foundation=square)))


def refuse_folder(rank, *, folder, model, message):
    with model_parallel(), pytest.raises(ValueError, match=message):
        load_hf_weights([], folder, model=hugging_face(model))


def test_square_experts_are_not_read(tmp_path):
    """Nor could we: transformers writes them one way round, the published files have the other."""
    model = QWEN3_VL_MOE
    hidden = model.foundation.hidden_size
    square = dataclasses.replace(model.foundation, expert_ffn_hidden_size=hidden // 2)
    model = dataclasses.replace(model, foundation=square)
    described = dataclasses.replace(hugging_face(model), inexpressible=())
    getattr(transformers, described.in_transformers.architecture)(
        hf_config(described)
    ).save_pretrained(tmp_path)
    run_ranks(refuse_folder, 1, folder=tmp_path, model=model, message="square matrices")


def test_shared_experts_stay_out_of_transformers_hands(published, processor, tmp_path):
    """Its model would leave them aside without a word, and has none to give."""
    model = QWEN3_VL_MOE
    text = dataclasses.replace(model.foundation, shared_expert_ffn_hidden_size=32)
    with_shared = dataclasses.replace(model, foundation=text)
    described = hugging_face(with_shared)
    message = "shared_expert_ffn_hidden_size is 32, but transformers' model has no shared experts"
    with pytest.raises(ValueError, match=message):
        check_hf_export(tmp_path, model=described, processor_folder=processor)
    with pytest.raises(ValueError, match=message):
        check_adapter_export(tmp_path, model=described)
    check_hf_export(tmp_path, model=hugging_face(model), processor_folder=processor)
    check_adapter_export(tmp_path, model=hugging_face(model))
    run_ranks(refuse_folder, 1, folder=published, model=with_shared, message=message)
