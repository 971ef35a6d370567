"""Projectors alone against transformers': features, and gradients of weights and of states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gathered import gather_full_tensors, replica_differences
from hf_reference import LIMIT, relative_error
from lone_parts import as_whole, assert_all_near, part_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from safetensors.torch import load_file, save_file
from towers import TOWERS, images, order_of, our_model, unit
from transformers import (
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2Config,
)
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
)
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.models.architecture import ProjectorArchitecture
from loongplug.models.hf_mapping import Mapping
from loongplug.models.hf_model import HuggingFaceModel
from loongplug.models.lora.adapter import add_adapters
from loongplug.models.lora.mapping import AdapterTable
from loongplug.models.lora.settings import LoraSettings
from loongplug.models.parts import Part, load
from loongplug.models.patch_transformer.config import PatchTransformerConfig
from loongplug.models.projectors import modules
from loongplug.models.projectors.config import (
    AveragePoolConfig,
    LinearConfig,
    MlpConfig,
    PixelShuffleConfig,
)
from loongplug.models.qwen3_vl.config import Qwen3VisionConfig

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
            theirs=f"{ROOT}.linear" if isinstance(self.projector, LinearConfig) else ROOT,
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
    "linear": Case(projector=LinearConfig(), side=5, merge=1),
    "mlp": Case(projector=MlpConfig(), side=5, merge=1),
    "mlp, no bias, tanh": Case(
        projector=MlpConfig(bias=False, activation="gelu_pytorch_tanh"), side=5, merge=1
    ),
    "pixel_shuffle": Case(projector=PixelShuffleConfig(), side=6, merge=2),
    "average_pool": Case(projector=AveragePoolConfig(), side=6, merge=2),
    "average_pool, threes": Case(projector=AveragePoolConfig(bias=False), side=6, merge=3),
}


@dataclass(frozen=True)
class Result:
    """Features [tokens, out], gradients by the names of the files, and that of the states."""

    features: torch.Tensor
    gradients: dict[str, torch.Tensor]
    of_states: torch.Tensor
    apart: float = 0.0


def weights_of_loss(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(IMAGES * (case.side // case.merge) ** 2, OUT, generator=generator)


def their_modules(case: Case) -> tuple[Any, Any]:
    """transformers' projector, and what makes its input of states in rows."""
    vision, projector = case.vision, case.projector
    sizes = {"hidden_size": OUT, "num_attention_heads": 2, "num_key_value_heads": 2}
    tower = {"model_type": "siglip_vision_model", "hidden_size": vision.hidden_size}
    if isinstance(projector, PixelShuffleConfig):
        config = InternVLConfig(
            vision_config={"hidden_size": vision.hidden_size},
            text_config=Qwen2Config(**sizes),
            downsample_ratio=case.described().values["downsample_ratio"],
            projector_hidden_act=projector.activation,
        )

        def shuffled(states: torch.Tensor) -> torch.Tensor:
            square = states.unflatten(1, (case.side, case.side))
            merged = InternVLModel.pixel_shuffle(None, square, config.downsample_ratio)
            return merged.flatten(0, 2)

        return InternVLMultiModalProjector(config), shuffled
    if isinstance(projector, LinearConfig):
        sounds = Qwen2AudioConfig(
            audio_config=Qwen2AudioEncoderConfig(d_model=vision.hidden_size),
            text_config=Qwen2Config(**sizes),
        )
        return Qwen2AudioMultiModalProjector(sounds), lambda states: states.flatten(0, 1)
    assert isinstance(projector, MlpConfig | AveragePoolConfig)
    config = LlavaConfig(
        vision_config=tower,
        text_config=LlamaConfig(**sizes),
        projector_hidden_act=projector.activation,
        multimodal_projector_bias=projector.bias,
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
    (features * weights_of_loss(case)).sum().backward()
    save_file(
        {f"{ROOT}.{name}": each for name, each in module.state_dict().items()},
        folder / "model.safetensors",
    )
    gradients = {f"{ROOT}.{name}": each.grad for name, each in module.named_parameters()}
    return Result(features.detach(), gradients, states.grad[:, order_of(case.vision)].flatten(0, 1))


def ours(rank: int, *, case: Case, folder: Path, tp: int) -> Result:
    with model_parallel(tp=tp):
        projector = case.build(tp=tp)
        model, described = torch.nn.ModuleDict({NAME: projector}), case.hugging_face()
        load_hf_weights([model], folder, model=described)
        mapping = described.mapping
        states = case.states()[:, order_of(case.vision)].flatten(0, 1).requires_grad_()
        features = projector(states, [])
        assert features.deepstack == ()
        (features.embeddings * weights_of_loss(case)).sum().backward()
        weights = gather_full_tensors([model], mapping)
        if weights is not None:
            written = load_file(folder / "model.safetensors")
            assert weights.keys() == written.keys()
            assert all(torch.equal(weights[name], each) for name, each in written.items())
        return Result(
            features.embeddings.detach(),
            gather_full_tensors([model], mapping, what="grad") or {},
            states.grad,
            max(replica_differences([model], mapping, what="grad").values(), default=0.0),
        )


def assert_same(found: Result, wanted: Result) -> None:
    assert relative_error(found.features, wanted.features) < LIMIT
    assert relative_error(found.of_states, wanted.of_states) < LIMIT
    assert_all_near(found.gradients, wanted.gradients)
    assert found.apart < 1e-6


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_features_and_gradients_are_those_of_transformers(
    case: Case, tp: int, tmp_path: Path
) -> None:
    expected = reference(case, tmp_path)
    assert_same(run_ranks(ours, tp, case=case, folder=tmp_path, tp=tp)[0], expected)


ADAPTERS = LoraSettings(rank=3, alpha=6.0)


def adapted(rank: int, *, folder: Path, tp: int) -> dict[str, torch.Tensor]:
    """A linear with adapters of random values: features, and all gradients by the files' names."""
    case = CASES["linear"]
    with model_parallel(tp=tp):
        projector = case.build(tp=tp)
        model, described = torch.nn.ModuleDict({NAME: projector}), case.hugging_face()
        load_hf_weights([model], folder, model=described)
        add_adapters(projector, ADAPTERS)
        beside, generator = projector.linear_fc1_lora, torch.Generator().manual_seed(6)
        with torch.no_grad():
            beside.a.copy_(torch.randn(beside.a.shape, generator=generator))
            beside.b.copy_(torch.randn(OUT, 3, generator=generator).chunk(tp)[rank])
        states = case.states().flatten(0, 1).requires_grad_()
        features = projector(states, []).embeddings
        (features * weights_of_loss(case)).sum().backward()
        table = AdapterTable({NAME: ADAPTERS}, described)
        gradients = gather_full_tensors([model], table.mapping, what="grad") or {}
        return {"features": features.detach(), "states": states.grad, **gradients}


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_stand_beside_a_linear(tmp_path: Path, tp: int) -> None:
    case = CASES["linear"]
    reference(case, tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(*size, generator=generator) for size in ((3, 24), (OUT, 3)))
    states = case.states().flatten(0, 1)
    for each in (a, b, states):
        each.requires_grad_()
    weight, bias = (plain[f"{ROOT}.linear.{kind}"] for kind in ("weight", "bias"))
    features = states @ (weight + ADAPTERS.scale * b @ a).T + bias
    (features * weights_of_loss(case)).sum().backward()
    wanted = {
        "features": features.detach(),
        "states": states.grad,
        f"{ROOT}.linear.lora_A.weight": a.grad,
        f"{ROOT}.linear.lora_B.weight": b.grad,
    }
    assert_all_near(run_ranks(adapted, tp, folder=tmp_path, tp=tp)[0], wanted)


def test_another_order_within_a_block_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    """As if a block's patches came column by column."""
    case = CASES["pixel_shuffle"]
    expected = reference(case, tmp_path)
    forward = modules.MlpProjector.forward

    def turned(self: Any, states: torch.Tensor, taps: list[torch.Tensor]) -> Any:
        blocks = states.unflatten(0, (-1, 2, 2)).transpose(1, 2)
        return forward(self, blocks.flatten(0, 2), taps)

    monkeypatch.setattr(modules.MlpProjector, "forward", turned)
    with pytest.raises(AssertionError):
        assert_same(run_ranks(ours, 1, case=case, folder=tmp_path, tp=1)[0], expected)


def test_another_activation_is_seen(tmp_path: Path) -> None:
    expected = reference(CASES["mlp"], tmp_path)
    other = Case(projector=MlpConfig(activation="quick_gelu"), side=5, merge=1)
    with pytest.raises(AssertionError):
        assert_same(run_ranks(ours, 1, case=other, folder=tmp_path, tp=1)[0], expected)


def tokens_of(rank: int, *, vision: PatchTransformerConfig, projector: str) -> tuple[int, ...]:
    case = CASES[projector]
    with model_parallel():
        encoder = our_model(vision)["image_encoder"]
        behind = load(case.part.build)(
            case.projector,
            vision=vision,
            config=encoder.config,
            output_size=OUT,
            groups=encoder.pg_collection,
        )
        features = behind(*encoder(unit(vision, images(vision, count=1))))
        return tuple(features.embeddings.shape)


@pytest.mark.parametrize(
    ("kind", "projector", "image", "merge", "tokens"),
    [
        ("clip", "mlp", 336, 1, 576),  # LLaVA-1.5
        ("intern", "pixel_shuffle", 448, 2, 256),  # a tile of InternVL
        ("siglip", "average_pool", 384, 3, 81),
    ],
)
def test_published_numbers_of_tokens(
    kind: str, projector: str, image: int, merge: int, tokens: int
) -> None:
    vision = TOWERS[kind].config(
        image_size=image, patch_size=14, spatial_merge_size=merge, num_layers=1
    )
    assert run_ranks(tokens_of, 1, vision=vision, projector=projector) == [(tokens, OUT)]


@pytest.mark.parametrize(
    ("name", "vision", "said"),
    [
        ("mlp", TOWERS["clip"].config(side=6, spatial_merge_size=2), "makes a token of each patch"),
        ("linear", TOWERS["clip"].config(side=6, spatial_merge_size=2), "token of each patch"),
        (
            "pixel_shuffle",
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
def test_what_it_cannot_stand_behind_is_refused(name: str, vision: Any, said: str) -> None:
    case = CASES[name]
    with pytest.raises(ValueError, match=said):
        load(case.part.build)(
            case.projector, vision=vision, config=None, output_size=OUT, groups=None
        )


def test_what_transformers_has_no_words_for_is_told() -> None:
    (pooling,) = CASES["average_pool"].described().unread
    assert "pools 2 x 2 patches" in pooling
    assert not Case(projector=AveragePoolConfig(), side=5, merge=1).described().unread
    other = Case(projector=PixelShuffleConfig(layernorm_epsilon=1e-6), side=6, merge=2)
    (epsilon,) = other.described().inexpressible
    assert "layernorm_epsilon is 1e-06" in epsilon
