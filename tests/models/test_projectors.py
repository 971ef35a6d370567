"""Projectors that no model of the tests has, against transformers': features and all gradients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gathered import gather_full_tensors, replica_differences
from lone_parts import Result, as_whole, assert_same, assert_same_files, loss_of, part_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from safetensors.torch import save_file
from towers import TOWERS, order_of
from transformers import LlamaConfig, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.models.architecture import ProjectorArchitecture
from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_mapping import Mapping
from loongplug.models.parts import Part, load
from loongplug.models.patch_transformer import PatchTransformerConfig
from loongplug.models.projectors import (
    AveragePoolConfig,
    LinearConfig,
    MlpConfig,
    PixelShuffleConfig,
)
from loongplug.models.qwen3_vl import Qwen3VisionConfig

NAME, ROOT = "image_projector", "multi_modal_projector"
OUT, IMAGES = 20, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A projector's config, the side of an image in patches, and of a block."""

    projector: ProjectorArchitecture
    side: int
    merge: int

    @property
    def vision(self) -> PatchTransformerConfig:
        return TOWERS["siglip"].config(side=self.side, spatial_merge_size=self.merge)

    @property
    def part(self) -> Part:
        return part_of(self.projector)

    def described(self) -> Any:
        return load(self.part.hugging_face)(
            self.projector,
            vision=self.vision,
            out=OUT,
            ours=NAME,
            theirs=ROOT,
        )

    def hugging_face(self) -> HuggingFaceModel:
        """The projector as if it were a whole model."""
        return as_whole(Mapping(self.described().rows, twins={}))

    def build(self, *, tp: int) -> Any:
        """Over Megatron's current groups."""
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=self.vision.hidden_size,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tp,
        )
        projector = load(self.part.build)(
            self.projector, vision=self.vision, config=config, output_size=OUT, groups=groups
        )
        projector.pg_collection = groups
        return projector

    def states(self) -> torch.Tensor:
        """[images, patches row by row, hidden], the same at every call."""
        generator = torch.Generator().manual_seed(3)
        return torch.randn(IMAGES, self.side**2, self.vision.hidden_size, generator=generator)


CASES = {
    "mlp, no bias, tanh": Case(
        projector=MlpConfig(bias=False, activation="gelu_pytorch_tanh"), side=5, merge=1
    ),
    "average_pool": Case(projector=AveragePoolConfig(), side=6, merge=2),
    "average_pool, threes": Case(projector=AveragePoolConfig(bias=False), side=6, merge=3),
}


def their_modules(case: Case) -> tuple[Any, Any]:
    """transformers' projector, and what makes its input of states in rows."""
    sizes = {"hidden_size": OUT, "num_attention_heads": 2, "num_key_value_heads": 2}
    tower = {"model_type": "siglip_vision_model", "hidden_size": case.vision.hidden_size}
    config = LlavaConfig(
        vision_config=tower,
        text_config=LlamaConfig(**sizes),
        projector_hidden_act=case.projector.activation,
        multimodal_projector_bias=case.projector.bias,
    )

    def pooled(states: torch.Tensor) -> torch.Tensor:
        square = states.unflatten(1, (case.side, case.side)).permute(0, 3, 1, 2)
        merged = torch.nn.functional.avg_pool2d(square, case.merge)
        return merged.flatten(2).transpose(1, 2).flatten(0, 1)

    return LlavaMultiModalProjector(config), pooled


def reference(case: Case, folder: Path) -> Result:
    torch.manual_seed(0)
    module, merged = their_modules(case)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    states = case.states().requires_grad_()
    features = module(merged(states))
    loss_of(features).backward()
    save_file(
        {f"{ROOT}.{name}": each for name, each in module.state_dict().items()},
        folder / "model.safetensors",
    )
    gradients = {f"{ROOT}.{name}": each.grad for name, each in module.named_parameters()}
    gradients["states"] = states.grad[:, order_of(case.vision)].flatten(0, 1)
    return Result(features.detach(), gradients)


def ours(rank: int, *, case: Case, folder: Path, tp: int) -> Result:
    with model_parallel(tp=tp):
        projector = case.build(tp=tp)
        model, described = torch.nn.ModuleDict({NAME: projector}), case.hugging_face()
        load_hf_weights([model], folder, model=described)
        mapping = described.mapping
        states = case.states()[:, order_of(case.vision)].flatten(0, 1).requires_grad_()
        features = projector(states, [])
        assert features.deepstack == ()
        loss_of(features.embeddings).backward()
        gradients = gather_full_tensors([model], mapping, what="grad") or {}
        return Result(
            features=features.embeddings.detach(),
            gradients=gradients | {"states": states.grad},
            weights=gather_full_tensors([model], mapping) or {},
            apart=max(replica_differences([model], mapping, what="grad").values(), default=0.0),
        )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_features_and_gradients_are_those_of_transformers(
    case: Case, tp: int, tmp_path: Path
) -> None:
    expected = reference(case, tmp_path)
    found = run_ranks(ours, tp, case=case, folder=tmp_path, tp=tp)[0]
    assert_same(found, expected)
    assert_same_files(found, tmp_path)


IN_BLOCKS = TOWERS["clip"].config(side=6, spatial_merge_size=2)


@pytest.mark.parametrize(
    ("projector", "vision", "said"),
    [
        (MlpConfig(), IN_BLOCKS, "makes a token of each patch"),
        (LinearConfig(), IN_BLOCKS, "token of each patch"),
        (
            AveragePoolConfig(),
            Qwen3VisionConfig(
                num_layers=2,
                hidden_size=24,
                ffn_hidden_size=48,
                num_attention_heads=4,
                num_position_embeddings=16,
                deepstack_layers=(0,),
            ),
            r"taps its layers \[0\]",
        ),
    ],
)
def test_what_it_cannot_stand_behind_is_refused(projector: Any, vision: Any, said: str) -> None:
    build, nothing = load(part_of(projector).build), {"config": None, "groups": None}
    with pytest.raises(ValueError, match=said):
        build(projector, vision=vision, output_size=OUT, **nothing)


def test_what_transformers_has_no_words_for_is_told() -> None:
    (pooling,) = CASES["average_pool"].described().unread
    assert "pools 2 x 2 patches" in pooling
    assert not Case(projector=AveragePoolConfig(), side=5, merge=1).described().unread
    other = Case(projector=PixelShuffleConfig(layernorm_epsilon=1e-6), side=6, merge=2)
    (epsilon,) = other.described().inexpressible
    assert "layernorm_epsilon is 1e-06" in epsilon
