"""The routers' balancing losses: every gradient is that of a formula written down here.

The formula is evaluated on the router logits of transformers, whose autograd differentiates it,
through all layers below each router.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_batches import batch
from hf_models import Layout, reference_model
from hf_reference import Reference, Step, assert_agrees, reference_step
from tiny_families import QWEN3_VL_MOE, SP
from torch import Tensor

TOP = QWEN3_VL_MOE.foundation.experts_per_token
EXPERTS = QWEN3_VL_MOE.foundation.num_experts
COEFFICIENT = 0.5  # large, so that a wrong factor shows
Z_COEFFICIENT = 0.02

Unit = Sequence[Tensor]  # a microbatch: of each sample the router logits [tokens, experts]


def counts(logits: Tensor) -> Tensor:
    """How many tokens each expert gets, [experts]."""
    return F.one_hot(logits.topk(TOP).indices, EXPERTS).sum((0, 1)).float()


def aux_loss(logits: Tensor, shares: Tensor) -> Tensor:
    """Switch's loss: share of the tokens times mean probability, summed over the experts."""
    return COEFFICIENT * EXPERTS * (shares * logits.softmax(-1).mean(0)).sum()


def micro(unit: Unit) -> Tensor:
    logits = torch.cat(list(unit))
    return aux_loss(logits, counts(logits) / (TOP * len(logits)))


def sequence(unit: Unit) -> Tensor:
    """Sample by sample; the lengths that both factors divide by are the unit's mean length."""
    mean = sum(map(len, unit)) / len(unit)
    losses = [
        aux_loss(logits, counts(logits) / (TOP * mean)) * (len(logits) / mean) for logits in unit
    ]
    return torch.stack(losses).mean()


def z_loss(unit: Unit) -> Tensor:
    return Z_COEFFICIENT * torch.cat(list(unit)).logsumexp(-1).square().mean()


def each_unit(loss: Callable[[Unit], Tensor]) -> Callable[[Sequence[Sequence[Unit]]], Tensor]:
    return lambda steps: torch.stack([torch.stack([loss(u) for u in units]) for units in steps])


def global_losses(steps: Sequence[Sequence[Unit]]) -> Tensor:
    """Shares are those of all replicas, over the microbatches of the step so far."""
    seen = torch.zeros(EXPERTS)
    losses = []
    for done, units in enumerate(steps):
        tokens = sum(len(logits) for unit in units for logits in unit)
        seen = seen + sum(counts(logits) for unit in units for logits in unit)
        shares = seen / (done + 1) / (TOP * tokens)
        # Each replica has its part of the mean over all; together they count as one each.
        parts = [aux_loss(cat, shares) * len(cat) / tokens for cat in map(torch.cat, units)]
        losses.append(torch.stack(parts) * len(units))
    return torch.stack(losses)


Kind = tuple[dict[str, Any], Callable[[Sequence[Sequence[Unit]]], Tensor]]
KINDS: dict[str, Kind] = {
    kind: (
        {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT},
        losses,
    )
    for kind, losses in (
        ("aux_loss", each_unit(micro)),
        ("seq_aux_loss", each_unit(sequence)),
        ("global_aux_loss", global_losses),
    )
}
KINDS["z_loss"] = ({"moe_z_loss_coeff": Z_COEFFICIENT}, each_unit(z_loss))
KINDS["all"] = (
    {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [COEFFICIENT] * 3,
        "moe_z_loss_coeff": Z_COEFFICIENT,
    },
    lambda steps: torch.stack([KINDS[kind][1](steps) for kind in KINDS if kind != "all"]).sum(0),
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    model = reference_model(QWEN3_VL_MOE)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return folder, model


def expected_step(model: Any, kind: str, *, replicas: int, size: int) -> Step:
    """The step with the kind's losses, each unit weighted by its tokens that count."""
    data, logits = batch(), []
    gates = [layer.mlp.gate for layer in model.model.language_model.layers]
    hooks = [
        gate.register_forward_hook(lambda _, __, outputs: logits.append(outputs[0]))
        for gate in gates
    ]
    samples = range(0, len(data.samples), size)
    units = [samples[first : first + replicas] for first in range(0, len(samples), replicas)]
    trained = torch.tensor(
        [[data.microbatch(unit, size).loss_mask.sum() for unit in step] for step in units]
    )

    def regularizer() -> Tensor:
        total = torch.zeros(())
        for layer in logits:
            every = layer.view(len(data.samples), -1, EXPERTS)
            real = [every[n, : sample.tokens] for n, sample in enumerate(data.samples)]
            steps = [[real[unit : unit + size] for unit in step] for step in units]
            total = total + (KINDS[kind][1](steps) * trained).sum() / trained.sum()
        return total

    model.zero_grad()
    step = reference_step(model, data, regularizer=regularizer)
    for hook in hooks:
        hook.remove()
    return step


LAYOUTS = [
    Layout(micro_batch_size=2, **SP),
    Layout(**SP, pp=2, recompute=True),
    Layout(dp=2, ep=2, micro_batch_size=2),
    Layout(dp=2, ep=2, **SP),
    Layout(pp=2, vpp=2),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_is_that_of_its_formula(weights, kind, size):
    assert_balanced(weights, kind, Layout(micro_batch_size=size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_losses_are_those_of_the_formula_in_every_layout(weights, layout):
    assert_balanced(weights, "all", layout)


def assert_balanced(weights: tuple[Any, Any], kind: str, layout: Layout) -> None:
    folder, model = weights
    step = expected_step(model, kind, replicas=layout.dp, size=layout.micro_batch_size)
    assert_agrees(Reference(QWEN3_VL_MOE, folder, batch(), step), layout, **KINDS[kind][0])
