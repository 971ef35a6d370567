"""What encoders keep of their media for a backward: what was loaded, and no values of pixels."""

from unittest.mock import patch

import pytest
import torch
from ranks import model_parallel, run_ranks
from test_device_tables import EYES, built, media_of
from test_hugging_face_encoder import TOWERS
from tiny_families import llava
from torch.autograd.graph import saved_tensors_hooks

from loongplug.data.microbatch import MediaInput
from loongplug.models.layers import inputs
from loongplug.training.config import compose_model

MODELS = ("qwen3_vl_tiny", "qwen2_5_vl_tiny", "llava_tiny")


def step(encoder, media):
    """Sizes of all that is saved but bytes, and gradients."""
    saved = set[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            saved.add(tensor.numel())
        return tensor

    encoder.zero_grad()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        states, taps = encoder(media)
        sum(each.float().square().sum() for each in (states, *taps)).backward()
    return saved, {name: each.grad for name, each in encoder.named_parameters()}


def steps(_: int, *, case: str, recompute: bool):
    """A step as it is, and one of autograd alone; how often and of how many bytes are values."""
    model = llava(TOWERS[case]) if case in TOWERS else compose_model(model_name=case).config
    architecture = model.encoder(EYES)
    object.__setattr__(architecture, "recompute", recompute)
    made, values = [], media_of(architecture)
    loaded = values.loaded.mul(64).add(128).clamp(0, 255).byte()

    def decode(loaded: torch.Tensor) -> torch.Tensor:
        made.append(loaded.numel())
        return loaded.float() / 64 - 2

    media = MediaInput(loaded=loaded, grids=values.grids, decode=decode)
    with model_parallel():
        encoder = built(model, EYES).bfloat16()
    found = step(encoder, media)
    times = len(made)
    with patch.object(inputs, "checkpoint", lambda compute, given, **_: compute(given)):
        plain = step(encoder, media)
    return found, plain, times, loaded.numel()


@pytest.mark.parametrize(
    ("case", "recompute"),
    [*((case, False) for case in (*MODELS, *TOWERS)), ("qwen2_5_vl_tiny", True), ("vit", True)],
)
def test_values_are_made_again_for_the_backward(case, recompute):
    ((found, plain, times, values),) = run_ranks(steps, 1, case=case, recompute=recompute)
    (saved, gradients), (saved_by_autograd, expected) = found, plain
    assert values not in saved
    assert values in saved_by_autograd
    assert times == (3 if case in TOWERS and recompute else 2)
    assert gradients.keys() == expected.keys()
    for name, each in expected.items():
        assert gradients[name] is each is None or torch.equal(gradients[name], each), name
    assert sum(each is not None and bool(each.any()) for each in expected.values()) > 5
