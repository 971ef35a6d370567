"""Patch transformers' files: names, config.json, checkpoints, and what only travels in them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lone_parts import part_of
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from ranks import model_parallel, run_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from towers import NAME, ROOT, TOWERS, described, images, mapping_of, our_model, their_config, unit

from loongplug.models.amounts import frame_macs
from loongplug.models.freezing import Freezing
from loongplug.models.hf_config import _fields
from loongplug.models.hf_mapping import Mapping, is_carried
from loongplug.models.parts import load
from loongplug.models.patch_transformer import PatchTransformerConfig
from loongplug.training.freezing import apply_freezing
from loongplug.verify.weights import random_tensor

CONFIGS = {
    "clip": TOWERS["clip"].config(feature_layer=-2),
    "siglip": TOWERS["siglip"].config(feature_layer=-3),
    "siglip, no head": TOWERS["siglip"].config(head=False, final_norm=True),
    "dinov2": TOWERS["dinov2"].config(feature_layer=-2),
    "intern": TOWERS["intern"].config(side=6),
    "intern, normed": TOWERS["intern"].config(side=6, final_norm=True, mask_token=True),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def whole_model(config: PatchTransformerConfig) -> Any:
    """A model of transformers around the tower."""
    text = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
    }
    tower, decoder = their_config(config), transformers.LlamaConfig(**text)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=tower, text_config=decoder)
    )


def shapes_of_tower(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118  no mapping
            if name.startswith(ROOT)
        }


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_published_files_have_another_root(name: str, tmp_path: Path) -> None:
    """transformers keeps the naming of the files that it has read."""
    config, root = CONFIGS[name], f"{ROOT}.vision_model"
    part = load(part_of(config).hugging_face)(config, ours=NAME, theirs=root)
    sources = Mapping(part.rows, twins={}).sources()
    whole_model(config).save_pretrained(tmp_path / "new")
    tensors = {}
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        for each in file.keys():  # noqa: SIM118  no mapping
            tensors[each.replace(f"{ROOT}.", f"{root}.")] = file.get_tensor(each)
    published = tmp_path / "published"
    transformers.AutoConfig.from_pretrained(tmp_path / "new").save_pretrained(published)
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    model, report = transformers.LlavaForConditionalGeneration.from_pretrained(
        published, output_loading_info=True
    )
    assert not any(report.values()), report
    model.save_pretrained(tmp_path / "again")
    assert sources == shapes_of_tower(tmp_path / "again") == shapes_of_tower(published)


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


def carried(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if is_carried(name)}


def fill(model: torch.nn.Module, mapping: Mapping) -> None:
    """Random values by name; what is split is as on one rank only."""
    with torch.no_grad():
        for name, parameter in carried(model).items():
            entry = mapping.find(name)
            assert entry is not None
            (source,) = entry.sources
            parameter.copy_(random_tensor(source, seed=0).reshape(parameter.shape))


def in_and_out_of_a_checkpoint(
    rank: int, *, config: PatchTransformerConfig, folder: Path, tp: int, saves: bool
) -> list[str]:
    """The carried tensors that are not what was saved."""
    with model_parallel(tp=tp):
        model, again = our_model(config, tp=tp), our_model(config, tp=tp)
        mapping = mapping_of(config)
        fill(model, mapping)
        encoder = (model if saves else again)[NAME]
        sharded = encoder.sharded_state_dict(
            f"{NAME}.", (), {"dp_cp_group": encoder.pg_collection.dp_cp}
        )
        if saves:
            dist_checkpointing.save(sharded, str(folder))
            return []
        loaded = dist_checkpointing.load(sharded, str(folder))
        encoder.load_state_dict({k.removeprefix(f"{NAME}."): v for k, v in loaded.items()})
        found = carried(again)
        assert found
        return [name for name, each in carried(model).items() if not torch.equal(each, found[name])]


@pytest.mark.slow
def test_what_travels_is_in_checkpoints_of_any_layout(tmp_path: Path) -> None:
    config = CONFIGS["siglip"]
    run_ranks(in_and_out_of_a_checkpoint, 2, config=config, folder=tmp_path, tp=2, saves=True)
    (apart,) = run_ranks(
        in_and_out_of_a_checkpoint, 1, config=config, folder=tmp_path, tp=1, saves=False
    )
    assert apart == []


def reduced_without_it(rank: int, *, config: PatchTransformerConfig) -> list[str]:
    """Overlapped reductions end; returns the parameters in gradient buffers."""
    with model_parallel():
        model = our_model(config)
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


def test_work_of_a_step_is_that_of_the_layers_that_run() -> None:
    deep = TOWERS["clip"].config(num_layers=5, feature_layer=-2)
    cut = TOWERS["clip"].config(num_layers=4, feature_layer=-1)
    own, same, more = (
        frame_macs(each)(4, 6) for each in (deep, cut, TOWERS["clip"].config(num_layers=5))
    )
    assert own == same < more
