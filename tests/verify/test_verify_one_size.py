"""Families whose images have one size, or tiles of one: full separation trains the single rank's.

What could go wrong there keeps all shapes: units are often of one length, and so are tiles.
"""

import pytest
from parity.encoder_faults import turn_the_patches_of_a_token, turn_the_tiles_of_an_image
from parity.mutations import swap_two_units
from verify_cases import Pair, failing, made_plan

from loongplug.verify.forked_runs import plan_runs
from loongplug.verify.plan import Request


def pair_of(model, folder):
    """TP 2 on two ranks, each with the encoder's whole weights."""
    flags = ("--tensor-model-parallel-size", "2", "--enable-full-hetero-dp")
    flags += ("model.image_encoder.tensor_model_parallel_size=1",)
    return Pair(made_plan(folder, *flags, model=model, steps=1), folder)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return pair_of("llava_tiny", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    return pair_of("internvl_tiny", tmp_path_factory.mktemp("internvl"))


TOWER = """\
# @package model
defaults:
  - /image_projector@image_projector: mlp
  - /llama@foundation: llama_tiny
  - _self_
_target_: loongplug.models.llava.LlavaConfig
image_encoder:
  _target_: loongplug.models.hugging_face_encoder.HuggingFaceEncoderConfig
  model_type: vit
  feature_layer: -2
"""


def test_an_encoder_of_transformers_agrees(tmp_path):
    file = tmp_path / "tower.yaml"
    file.write_text(TOWER)
    flags = ("--device", "cpu", "--config-file", str(file), "--enable-full-hetero-dp")
    flags += ("--pipeline-model-parallel-size", "2")
    request = Request(flags=flags, scale="tiny", steps=2)
    pair = Pair(plan_runs(request, folder=tmp_path / "runs"), tmp_path / "runs")
    pair.agreeing()


def test_they_agree_without_a_fault(llava, internvl):
    for pair in (llava, internvl):
        comparison = pair.agreeing()
        assert all(comparison.worst(what).error for what in ("gradients", "parameters"))


def test_images_of_two_units_that_change_places(llava):
    assert failing(llava.compared(swap_two_units), "gradients") >= {
        *("image_encoder", "image_projector", "text_decoder layers")
    }


@pytest.mark.parametrize("fault", [turn_the_tiles_of_an_image, turn_the_patches_of_a_token])
def test_pixels_in_another_order(internvl, fault):
    assert failing(internvl.compared(fault), "gradients") >= {
        *("image_encoder", "image_projector", "text_decoder layers")
    }
