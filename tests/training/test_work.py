"""The operations of a step, against formulas by hand and against torch's own counter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from loongplug.training.work import StepWork

pytestmark = pytest.mark.quick

NAME = "image_encoder"
# qwen3_vl_tiny: three encoder layers of width 64 and MLP 128, patches of 1536 values, 2 x 2 merged
# to width 128; two taps; four decoder layers of width 128, 4 heads of 32, 2 groups, MLP 384.
PATCHES = 1536 * 64
ENCODER = 3 * (4 * 64 * 64 + 2 * 64 * 128)
PROJECTOR = 3 * (256 * 256 + 256 * 128)
DECODER = 4 * (128 * 256 + 128 * 128 + 3 * 128 * 384)
OUTPUT = 128 * 128
GRID = (1, 4, 6)
LENGTHS = (10, 30)
TEXT_PAIRS = (10 * 11 + 30 * 31) // 2
TEXT_ATTENTION = 4 * 4 * 128 * TEXT_PAIRS  # layers, of two products each, a pair, all heads
IMAGE_ATTENTION = 3 * 4 * 64 * 24**2


def work(*overrides: str, model: str = "qwen3_vl_tiny", freeze=(), train=()) -> StepWork:
    from loongplug.models.freezing import Freezing
    from loongplug.models.lora.mapping import adapter_table, with_adapters
    from loongplug.training.config import compose_model

    composed = compose_model(
        model_name=model, config_file=None, overrides=overrides, trusted_packages=[]
    )
    config = composed.config
    hf = composed.family.load_hugging_face(config)
    modules = config.modules().items()
    adapted = tuple(name for name, each in modules if each.lora)
    frozen = tuple(name for name, each in modules if each.freeze)
    return StepWork.of(
        config,
        with_adapters(hf.mapping, adapter_table(config, hf)),
        trains=Freezing(modules=frozen, adapted=adapted, freeze=freeze, train=train).trains,
    )


def test_all_trained_is_three_times_forward_but_for_the_pixels_gradient():
    found = work()
    (encoder,) = found.encoders
    assert encoder.name == NAME
    assert encoder.per_row == 2 * (2 * PATCHES + 3 * ENCODER)
    assert encoder.per_media_token == 6 * PROJECTOR
    assert found.per_token == 6 * (DECODER + OUTPUT)
    assert found.of_samples(LENGTHS, {NAME: [GRID]}) == (
        24 * encoder.per_row
        + 6 * encoder.per_media_token
        + 40 * found.per_token
        + 3 * (TEXT_ATTENTION + IMAGE_ATTENTION)
    )


def test_a_tied_output_works_as_one_of_its_own():
    assert work("model.foundation.tie_word_embeddings=true") == work()


def test_a_frozen_encoder_has_a_forward_only():
    found = work("model.image_encoder.freeze=true", "model.foundation.freeze=true")
    (encoder,) = found.encoders
    assert encoder.per_row == 2 * (PATCHES + ENCODER)
    # The first of a merger's matrices is behind its norm, which trains.
    assert encoder.per_media_token == 6 * PROJECTOR
    assert found.per_token == 4 * (DECODER + OUTPUT)  # no gradients of weights
    assert found.of_samples((), {NAME: [GRID]}) == (
        24 * encoder.per_row + 6 * encoder.per_media_token + IMAGE_ATTENTION
    )
    text = 40 * found.per_token + 3 * TEXT_ATTENTION
    assert found.of_samples(LENGTHS, {NAME: ()}) == found.of_samples(LENGTHS, {}) == text


def test_nothing_has_a_backward_before_the_first_that_trains():
    found = work(freeze=("*",), train=("text_decoder.decoder.layers.2.mlp.linear_fc1.weight",))
    layer, fc1, fc2 = DECODER // 4, 2 * 128 * 384, 128 * 384
    assert found.per_token == 2 * (
        (3 * layer - fc1 - fc2) + 2 * fc1 + 2 * fc2 + 2 * layer + 2 * OUTPUT
    )
    assert found.per_pair == 4 * 128 * (4 + 2)  # of the last layer's attention
    (encoder,) = found.encoders
    assert (encoder.per_row, encoder.passes) == (2 * (PATCHES + ENCODER), 1)


def test_adapters_work_beside_frozen_matrices():
    found = work("+model.foundation.lora.rank=4", "model.image_encoder.freeze=true")
    a = 4 * (4 * (128 + 128 + 128 + 384))
    b = 4 * (4 * (256 + 128 + 768 + 128))
    assert found.per_token == 4 * (DECODER + OUTPUT) + 6 * (a + b)


def test_a_token_passes_the_experts_that_it_is_routed_to():
    found = work(model="qwen3_vl_moe_tiny")
    attention, router, expert = 128 * 256 + 128 * 128, 8 * 128, 3 * 128 * 96
    assert found.per_token == 6 * (4 * (attention + router + 2 * expert) + OUTPUT)


def test_windows_limit_the_encoder_s_attention():
    (encoder,) = work(model="qwen2_5_vl_tiny").encoders
    frame = encoder.attention.of_units([[(1, 16, 16)]])[0]
    windows = 8 * 8 * (2 * 2) ** 2  # pairs within 2 x 2 patches, in two of the four layers
    assert frame == 2 * (2 * 64) * (256**2 + windows)
    assert encoder.attention.of_units([[(3, 16, 16)]])[0] == 3 * frame


def counted() -> int:
    """What torch counts of one encoder layer behind the patch embedding, in plain torch."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens, width, ffn = 24, 64, 128
    linears = [
        torch.nn.Linear(a, b)
        for a, b in ((1536, 64), (64, 192), (64, 64), (width, ffn), (ffn, width))
    ]
    embed, qkv, proj, fc1, fc2 = linears
    with FlopCounterMode(display=False) as counter:
        states = embed(torch.randn(tokens, 1536))
        q, k, v = qkv(states).view(tokens, 3, 4, 16).permute(1, 2, 0, 3)
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        states = states + proj((weights @ v).transpose(0, 1).reshape(tokens, width))
        (states + fc2(F.gelu(fc1(states)))).sum().backward()
    return counter.get_total_flops()


def test_an_encoder_layer_works_as_torch_counts_it():
    found = work("model.image_encoder.num_layers=1", "model.image_encoder.deepstack_layers=[]")
    (encoder,) = found.encoders
    attention = 2 * encoder.passes * encoder.attention.of_units([[GRID]])[0]
    assert 24 * encoder.per_row + attention == counted()


def test_each_encoder_s_media_are_its_own_work():
    """A second encoder like the first, of half its passes."""
    one = work()
    (eyes,) = one.encoders
    ears = replace(eyes, name="ears", per_row=7, per_media_token=11, passes=eyes.passes / 2)
    both = replace(one, encoders=(eyes, ears))
    of_eyes, of_both = one.of_samples((), {NAME: [GRID]}), both.of_samples
    assert of_both((), {NAME: [GRID]}) == of_eyes
    of_ears = 24 * 7 + 6 * 11 + 3 * IMAGE_ATTENTION // 2
    assert of_both((), {"ears": [GRID]}) == of_ears
    assert of_both((), {NAME: [GRID, GRID], "ears": [GRID]}) == 2 * of_eyes + of_ears
