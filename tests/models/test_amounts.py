"""The work of a model, against formulas by hand and against torch's own counter."""

from collections import Counter
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F

from loongplug.models.amounts import (
    EntryAmounts,
    ModelAmounts,
    frame_macs,
    frame_pairs,
    media_extent,
    operations,
)

pytestmark = pytest.mark.quick

Names = tuple[str, ...]

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


def amounts(
    *overrides: str, model: str = "qwen3_vl_tiny", freeze: Names = (), train: Names = ()
) -> ModelAmounts:
    from loongplug.models.freezing import Freezing
    from loongplug.training.config import compose_model

    composed = compose_model(
        model_name=model, config_file=None, overrides=overrides, trusted_packages=[]
    )
    config = composed.config
    modules = config.modules().items()
    adapted = tuple(name for name, each in modules if each.lora)
    frozen = tuple(name for name, each in modules if each.freeze)
    return ModelAmounts.of(
        config,
        composed.family.load_hugging_face(config),
        trains=Freezing(modules=frozen, adapted=adapted, freeze=freeze, train=train).trains,
    )


def both(entry: EntryAmounts) -> Counter[Any]:
    """Forward and backward of a state, and of a pair."""
    return entry.forward + entry.backward


def projectors(found: ModelAmounts) -> int:
    """Forward and backward of a token's projectors."""
    ways = ((each.forward, each.backward) for each in found.entries[NAME].beside)
    return sum(forward["states"] + backward["states"] for forward, backward in ways)


def test_all_trained_is_three_times_forward_but_for_the_pixels_gradient() -> None:
    found = amounts()
    eyes, text = (both(each) for each in found.entries.values())
    assert eyes == {"states": 2 * (2 * PATCHES + 3 * ENCODER), None: 3 * 3 * 4 * 64}
    assert projectors(found) == 6 * PROJECTOR
    assert text == {"states": 6 * (DECODER + OUTPUT), None: 3 * 4 * 4 * 128}
    assert found.of_samples(LENGTHS, {NAME: [GRID]}) == (
        24 * eyes["states"]
        + 6 * projectors(found)
        + 40 * text["states"]
        + 3 * (TEXT_ATTENTION + IMAGE_ATTENTION)
    )


def test_a_tied_output_works_as_one_of_its_own() -> None:
    tied = amounts("model.foundation.tie_word_embeddings=true")
    assert tied.entries == amounts().entries


def test_a_frozen_encoder_has_a_forward_only() -> None:
    found = amounts("model.image_encoder.freeze=true", "model.foundation.freeze=true")
    eyes, text = (both(each) for each in found.entries.values())
    assert eyes["states"] == 2 * (PATCHES + ENCODER)
    # The first of a merger's matrices is behind its norm, which trains.
    assert projectors(found) == 6 * PROJECTOR
    assert text["states"] == 4 * (DECODER + OUTPUT)  # no gradients of weights
    assert found.of_samples((), {NAME: [GRID]}) == (
        24 * eyes["states"] + 6 * projectors(found) + IMAGE_ATTENTION
    )
    of_text = 40 * text["states"] + 3 * TEXT_ATTENTION
    assert found.of_samples(LENGTHS, {NAME: ()}) == found.of_samples(LENGTHS, {}) == of_text


def test_nothing_has_a_backward_before_the_first_that_trains() -> None:
    found = amounts(freeze=("*",), train=("text_decoder.decoder.layers.2.mlp.linear_fc1.weight",))
    layer, fc1, fc2 = DECODER // 4, 2 * 128 * 384, 128 * 384
    eyes, text = (both(each) for each in found.entries.values())
    assert text["states"] == 2 * (
        (3 * layer - fc1 - fc2) + 2 * fc1 + 2 * fc2 + 2 * layer + 2 * OUTPUT
    )
    assert text[None] == 4 * 128 * (4 + 2)  # of the last layer's attention
    assert eyes == {"states": 2 * (PATCHES + ENCODER), None: 3 * 4 * 64}


def test_adapters_work_beside_frozen_matrices() -> None:
    found = amounts("+model.foundation.lora.rank=4", "model.image_encoder.freeze=true")
    a = 4 * (4 * (128 + 128 + 128 + 384))
    b = 4 * (4 * (256 + 128 + 768 + 128))
    assert both(found.decoder)["states"] == 4 * (DECODER + OUTPUT) + 6 * (a + b)


def test_a_token_passes_the_experts_that_it_is_routed_to() -> None:
    found = amounts(model="qwen3_vl_moe_tiny")
    attention, router, expert = 128 * 256 + 128 * 128, 8 * 128, 3 * 128 * 96
    layers = 4 * (attention + router + 2 * expert)
    assert both(found.decoder)["states"] == 6 * (layers + OUTPUT)


def test_windows_limit_the_attention_of_their_layers() -> None:
    """Each with a backward of its own: of four layers, two with windows, the first is frozen."""
    assert frame_pairs(16, 16, 2) == 8 * 8 * (2 * 2) ** 2
    assert frame_pairs(5, 3, 2) == (2 * 2 + 2 * 2 + 1) * (2 * 2 + 1)
    found = amounts(model="qwen2_5_vl_tiny", freeze=(f"{NAME}.*",), train=(f"{NAME}.*.layers.1.*",))
    encoder, eyes = found.model.encoder(NAME), found.entries[NAME]
    assert encoder.attention_windows() == {2: 2, None: 2}
    assert eyes.forward == {"states": ANY, 2: 2 * 4 * 64, None: 2 * 4 * 64}
    assert eyes.backward == {"states": ANY, 2: 2 * 4 * 64, None: 2 * 2 * 4 * 64}
    extent = media_extent(encoder, [(3, 16, 16)])
    assert extent == {"states": 3 * 256, 2: 3 * 8 * 8 * (2 * 2) ** 2, None: 3 * 256**2}


@pytest.mark.parametrize(
    "model",
    [
        *("qwen3_vl_tiny", "qwen2_5_vl_tiny", "llava_tiny", "internvl_tiny"),
        *("qwen2_audio_tiny", "qwen2_5_omni_tiny"),
    ],
)
def test_encoders_are_balanced_by_the_work_of_their_layers(model: str) -> None:
    found = amounts(model=model)
    for name in found.model.encoders:
        encoder, (_, *layers, _) = found.model.encoder(name), found.entries[name].layers
        forward = sum((each.forward for each in layers), Counter())
        of_media = operations(forward, media_extent(encoder, [(3, 4, 6)]))
        assert of_media == 2 * 3 * frame_macs(encoder)(4, 6)


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


def test_an_encoder_layer_works_as_torch_counts_it() -> None:
    found = amounts("model.image_encoder.num_layers=1", "model.image_encoder.deepstack_layers=[]")
    extent = media_extent(found.model.encoder(NAME), [GRID])
    assert operations(both(found.entries[NAME]), extent) == counted()


def test_each_encoder_s_media_are_its_own_work() -> None:
    found = amounts(model="qwen2_5_omni_tiny")
    media = {name: [found.model.encoder(name).grid_of(16)] for name in found.model.encoders}
    assert len(media) == 2
    each = [found.of_samples((), {name: grids}) for name, grids in media.items()]
    assert 0 < each[0] != each[1] > 0
    assert found.of_samples((), media) == sum(each)
