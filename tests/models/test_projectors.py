"""The average pool, which no model of transformers has, and what projectors cannot stand behind."""

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gathered import gather_full_tensors, replica_differences
from lone_parts import Result, assert_same, loss_of, part_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from torch import Tensor
from towers import TOWERS, order_of

from loongplug.models.family import HuggingFacePart
from loongplug.models.hf_mapping import Mapping
from loongplug.models.parts import load
from loongplug.models.projectors import (
    AveragePoolConfig,
    LinearConfig,
    MlpConfig,
    PixelShuffleConfig,
)
from loongplug.models.qwen3_vl import Qwen3VisionConfig

NAME, ROOT = "image_projector", "multi_modal_projector"
OUT, IMAGES, SIDE = 20, 2, 6


def vision(merge: int) -> Any:
    return TOWERS["siglip"].config(side=SIDE, spatial_merge_size=merge)


def described(projector: Any, *, merge: int) -> HuggingFacePart:
    tensors = load(part_of(projector).hugging_face)
    found: HuggingFacePart = tensors(
        projector, vision=vision(merge), out=OUT, ours=NAME, theirs=ROOT
    )
    return found


def states() -> Tensor:
    """[images, patches row by row, hidden], the same at every call."""
    sizes = IMAGES, SIDE**2, vision(1).hidden_size
    drawn = torch.randn(prod(sizes), generator=torch.Generator().manual_seed(3))
    return drawn.view(sizes).requires_grad_()


def ours(rank: int, *, projector: AveragePoolConfig, merge: int, tp: int) -> Result:
    """Features, gradients and weights, by the names of the files."""
    with model_parallel(tp=tp):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=vision(merge).hidden_size,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tp,
        )
        built = load(part_of(projector).build)(
            projector, vision=vision(merge), config=config, output_size=OUT, groups=groups
        )
        built.pg_collection = groups
        model = torch.nn.ModuleDict({NAME: built})
        mapping = Mapping(described(projector, merge=merge).rows, twins={})
        given = states()
        features = built(given[:, order_of(vision(merge))].flatten(0, 1), [])
        assert features.deepstack == ()
        loss_of(features.embeddings).backward()
        gradients = gather_full_tensors([model], mapping, what="grad") or {}
        return Result(
            features=features.embeddings.detach(),
            gradients=gradients | {"states": given.grad},
            weights=gather_full_tensors([model], mapping) or {},
            apart=max(replica_differences([model], mapping, what="grad").values(), default=0.0),
        )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("merge", "bias"), [(2, True), (3, False)])
def test_an_average_pool_is_torch_s_before_two_linears(merge: int, bias: bool, tp: int) -> None:
    projector = AveragePoolConfig(bias=bias)
    found = run_ranks(ours, tp, projector=projector, merge=merge, tp=tp)[0]
    weights = {name: each.requires_grad_() for name, each in found.weights.items()}
    given = states()
    square = given.unflatten(1, (SIDE, SIDE)).permute(0, 3, 1, 2)
    rows = F.avg_pool2d(square, merge).flatten(2).transpose(1, 2).flatten(0, 1)
    for number in (1, 2):
        linear = f"{ROOT}.linear_{number}"
        rows = F.linear(rows, weights[f"{linear}.weight"], weights.get(f"{linear}.bias"))
        rows = F.gelu(rows) if number == 1 else rows
    loss_of(rows).backward()
    gradients = {name: each.grad for name, each in weights.items()}
    assert len(gradients) == 2 + 2 * bias
    assert_same(found, Result(rows.detach(), gradients | {"states": given.grad}))


IN_BLOCKS = TOWERS["clip"].config(side=6, spatial_merge_size=2)
TAPPED = Qwen3VisionConfig(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_position_embeddings=16,
    deepstack_layers=(0,),
)


@pytest.mark.parametrize(
    ("projector", "behind", "said"),
    [
        (MlpConfig(), IN_BLOCKS, "makes a token of each patch"),
        (LinearConfig(), IN_BLOCKS, "token of each patch"),
        (AveragePoolConfig(), TAPPED, r"taps its layers \[0\]"),
    ],
)
def test_what_it_cannot_stand_behind_is_refused(projector: Any, behind: Any, said: str) -> None:
    build, nothing = load(part_of(projector).build), {"config": None, "groups": None}
    with pytest.raises(ValueError, match=said):
        build(projector, vision=behind, output_size=OUT, **nothing)


def test_what_transformers_has_no_words_for_is_told() -> None:
    (pooling,) = described(AveragePoolConfig(), merge=2).unread
    assert "pools 2 x 2 patches" in pooling
    assert not described(AveragePoolConfig(), merge=1).unread
    (epsilon,) = described(PixelShuffleConfig(layernorm_epsilon=1e-6), merge=2).inexpressible
    assert "layernorm_epsilon is 1e-06" in epsilon
