"""Plans of microbatches, run one beside the other, against the model's own forward and backward.

Bit by bit, on each of two ranks that share the experts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_units import ENCODER
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.data.microbatch import MediaInput, Unit
from loongplug.models.decoder import DecoderConfig
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.registry import family_of
from loongplug.schedule.chunk_plan import ChunkPlan, plan_schedules
from loongplug.training.config import compose_model

IMAGE = 5
LENGTH = 24
ENCODERS = "eyes", "ears"  # that would go on when a backward begins
BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.5],
    "moe_z_loss_coeff": 0.02,
}
FRONT = ("image_encoder", "image_projector", "text_decoder.embedding")
# Overrides of the tiny model, settings of its decoder's config, and what is frozen.
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "first-layers": ((), BALANCED, ()),
    # The norm behind the last layer comes behind its feature.
    "all-layers": (("model.foundation.num_layers=2",), {}, ()),
    "nothing-in-front-trains": ((), {}, FRONT),
    "projector-trains": ((), {}, ("image_encoder", "text_decoder")),
}

Inputs = dict[str, Any]
Numbers = tuple[list[Tensor], dict[str, Tensor | None]]


def built(overrides: Sequence[str], options: dict[str, Any]) -> MultimodalModel:
    """The tiny model, with half of the experts on this rank."""
    model: Any = compose_model(model_name="qwen3_vl_moe_tiny", overrides=overrides).config
    ids = {name: number for number, name in enumerate(family_of(model).special_tokens, IMAGE)}
    model = dataclasses.replace(model, **ids)
    fields = {field.name for field in dataclasses.fields(DecoderConfig)}
    arguments = family_of(model).megatron_arguments(model)
    config = DecoderConfig(
        **{name: argument.value for name, argument in arguments.items() if name in fields},
        num_moe_experts=model.foundation.num_experts,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        calculate_per_token_loss=True,
        **options,
    )
    return family_of(model).load_builder(model)(
        model,
        config,
        pre_process=True,
        post_process=True,
        vp_stage=None,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        backend="local",
    )


def microbatch(seed: int, *, images: int) -> Inputs:
    """Two rows, the first of them with ``images`` of four tokens each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, 100, (2, LENGTH), generator=generator)
    ids[0, 3 : 3 + 4 * images] = IMAGE
    places = np.arange(3, 3 + 4 * images), np.zeros(0, dtype=np.int64)
    positions = torch.arange(LENGTH).expand(3, 2, LENGTH).clone()
    positions[:, 1, LENGTH - 6 :] = 0  # padding
    mask = (torch.rand(2, LENGTH, generator=generator) < 0.5).float()
    mask[1, LENGTH - 6 :] = 0
    media = MediaInput(
        loaded=torch.randn(16 * images, 1536, generator=generator),
        grids=torch.tensor([[1, 4, 4]] * images).reshape(images, 3),
    )
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": torch.randint(100, (2, LENGTH), generator=generator),
        "loss_mask": mask,
        "units": {ENCODER: Unit(places=places, media=media)},
    }


def apart(model: MultimodalModel, microbatches: Sequence[Inputs]) -> list[Tensor]:
    """Losses of the tokens; forward and backward of one microbatch after the other."""
    losses = [model(**inputs) for inputs in microbatches]
    for inputs, each in zip(microbatches, losses, strict=True):
        each.backward(inputs["loss_mask"])
    return [each.detach() for each in losses]


def overlapped(model: MultimodalModel, microbatches: Sequence[Inputs]) -> list[Tensor]:
    """The same with each backward beside the next forward."""
    set_streams()
    plan_schedules(model)
    losses: list[Tensor] = []
    before: Any = None
    gradient = None
    begun: list[tuple[int, str]] = []  # backwards, and who is told of them
    for number, inputs in enumerate(microbatches):
        plan = model.build_schedule_plan(**inputs)
        for encoder in ENCODERS:
            plan.on_backward(partial(begun.append, (number, encoder)))
        losses.append(ChunkPlan.run(plan, before, b_grad=gradient).detach())
        before, gradient = plan, inputs["loss_mask"]
        assert begun == list(product(range(number), ENCODERS))
    ChunkPlan.run(None, before, b_grad=gradient)
    assert begun == list(product(range(len(microbatches)), ENCODERS))
    return losses


def numbers(rank: int, *, case: str) -> list[Numbers]:
    """Losses and gradients of both ways."""
    overrides, options, frozen = CASES[case]
    found = []
    with model_parallel(ep=2):
        model = built(overrides, options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        microbatches = [
            microbatch(10 * rank + number, images=images) for number, images in enumerate((2, 0, 3))
        ]
        ways: tuple[Callable[..., list[Tensor]], ...] = (apart, overlapped)
        for way in ways:
            model.zero_grad()
            losses = way(model, microbatches)
            found.append((losses, {name: each.grad for name, each in model.named_parameters()}))
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_forward_and_backward(case):
    for of_rank in run_ranks(numbers, 2, case=case):
        assert_same(*of_rank, frozen=CASES[case][2])


def assert_same(one: Numbers, other: Numbers, *, frozen: tuple[str, ...]) -> None:
    (expected, gradients), (losses, found) = one, other
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    for name, gradient in gradients.items():
        assert (gradient is None) == (found[name] is None) == name.startswith(frozen), name
        assert gradient is None or torch.equal(gradient, found[name]), name
    deepstack = [each for name, each in gradients.items() if ".deepstack." in name]
    assert all(each is None or bool(each.any()) for each in deepstack)
    assert len(deepstack) == 2 * 6


def plans_with_megatrons_offload(rank):
    """How often each of two microbatches' plans prepared Megatron's own offload of modules."""
    with model_parallel(ep=2):
        model = built((), {})
        plan_schedules(model)
        prepared = []
        model.text_decoder.preprocess_for_fine_grained_offloading = lambda: prepared.append(1)
        counts = []
        for switched_on in (False, True):
            model.text_decoder.config.fine_grained_activation_offloading = switched_on
            set_streams()
            model.build_schedule_plan(**microbatch(1, images=1))
            counts.append(len(prepared))
        return counts


def test_megatrons_own_offload_is_prepared_for_each_microbatch():
    assert run_ranks(plans_with_megatrons_offload, 2) == [[0, 1], [0, 1]]
