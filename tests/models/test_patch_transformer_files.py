"""Patch transformers' files: names, config.json, checkpoints, and what only travels in them."""

from typing import Any

import pytest
import transformers
from lone_parts import lone_encoder, part_of
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from ranks import model_parallel, run_ranks
from towers import NAME, TOWERS, described, images, mapping_of, their_config, unit

from loongplug.models.freezing import Freezing
from loongplug.models.hf_config import _fields
from loongplug.models.hf_mapping import is_carried
from loongplug.models.patch_transformer import PatchTransformerConfig
from loongplug.training.freezing import apply_freezing

CONFIGS = {
    "clip": TOWERS["clip"].config(feature_layer=-2),
    "siglip": TOWERS["siglip"].config(feature_layer=-3),
    "siglip, no head": TOWERS["siglip"].config(head=False, final_norm=True),
    "dinov2": TOWERS["dinov2"].config(feature_layer=-2),
    "intern": TOWERS["intern"].config(side=6),
    "intern, normed": TOWERS["intern"].config(side=6, final_norm=True, mask_token=True),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@each_config
def test_config_json_gives_the_config_back(config: PatchTransformerConfig) -> None:
    part = part_of(config)
    section = their_config(config)
    assert section.model_type == part.model_type
    fields = _fields(part, section)
    assert {name: getattr(config, name) for name in fields} == fields
    sizes = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "in_channels"}
    assert sizes | {"image_size", "patch_size", "layernorm_epsilon", "activation"} <= set(fields)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("intern", {"norm_type": "rms_norm"}),
        ("intern", {"use_qk_norm": True}),  # InternViT-6B
        ("intern", {"attention_bias": False}),
        ("intern", {"use_mean_pooling": False}),
        ("dinov2", {"use_swiglu_ffn": True}),  # DINOv2-giant
        ("dinov2", {"qkv_bias": False}),
    ],
)
def test_what_there_is_not_differs_from_what_config_json_is_compared_with(
    name: str, changes: dict[str, Any]
) -> None:
    values = described(CONFIGS[name]).values
    ((key, other),) = changes.items()
    assert values[key] != other


def test_a_tower_that_is_not_square_is_refused() -> None:
    part = part_of(CONFIGS["intern"])
    section = transformers.InternVLVisionConfig(image_size=(448, 224))
    with pytest.raises(ValueError, match="image_size 448 x 224 is not a square"):
        _fields(part, section)


def test_an_mlp_that_transformers_has_no_words_for_cannot_be_exported() -> None:
    (sentence,) = described(TOWERS["dinov2"].config(ffn_hidden_size=50)).inexpressible
    assert "ffn_hidden_size is 50" in sentence


def reduced_without_it(rank: int, *, config: PatchTransformerConfig) -> list[str]:
    """Overlapped reductions end; returns the parameters in gradient buffers."""
    with model_parallel():
        model = lone_encoder(config, name=NAME, tp=1)
        freezing = Freezing(modules=(NAME,), train=("*",))
        apply_freezing([model], freezing, mapping=mapping_of(config))
        wrapped = DistributedDataParallel(
            config=model[NAME].config,
            ddp_config=DistributedDataParallelConfig(
                overlap_grad_reduce=True, use_distributed_optimizer=False
            ),
            module=model,
        )
        names = {parameter: name for name, parameter in model.named_parameters()}
        states, _ = model[NAME](unit(config, images(config)))
        states.sum().backward()
        wrapped.finish_grad_sync()
        return [names[each] for buffer in wrapped.buffers for each in buffer.params]


@pytest.mark.parametrize("name", ["clip", "intern, normed"])
def test_what_travels_never_trains(name: str) -> None:
    first, second = run_ranks(reduced_without_it, 2, config=CONFIGS[name])
    assert first == second
    assert first
    assert not [name for name in first if is_carried(name)]


def test_patterns_are_told_of_what_can_train_only() -> None:
    travels = f"{NAME}.carried.post_layernorm_weight"
    freezing = Freezing(train=("*post*",), freeze=("*post_layernorm*",))
    assert not freezing.trains(travels)
    assert freezing.without_effect([travels]) == {"*post*", "*post_layernorm*"}
