"""Experts get the tokens that are no padding, and nothing else: counts, outputs, gradients."""

from typing import Any

import pytest
import torch
from layer_configs import decoder_config
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers.specs import decoder_layer_spec

TOP, EXPERTS, HIDDEN = 2, 4, 24
# Tokens of each of the four rows, which are all as long as the longest: one has next to nothing.
LENGTHS = (7, 12, 1, 5)
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}


def layer_of(*, ep: int, **settings: Any) -> Any:
    config = decoder_config(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_ffn_hidden_size=20,
        use_cpu_initialization=True,
        expert_model_parallel_size=ep,
        calculate_per_token_loss=True,
        **settings,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    spec = decoder_layer_spec(config, backend="local")
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups).mlp
    # The same weights whoever holds them, by an expert's number among all.
    generator = torch.Generator().manual_seed(3)
    every = torch.randn(EXPERTS, 2, 2 * 20 * HIDDEN, generator=generator) / 5
    for number, expert in enumerate(layer.experts.local_experts):
        values = every[layer.local_expert_indices[number]]
        for weight, found in zip(expert.parameters(), values, strict=True):
            weight.data.copy_(found[: weight.numel()].view_as(weight))
    layer.router.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    return layer


def rows(ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens [s, b, hidden], and what routers know of them [2 * s, b]; all count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(max(LENGTHS), len(LENGTHS), HIDDEN, generator=generator)
    padding = torch.arange(max(LENGTHS))[:, None] >= torch.tensor(LENGTHS)
    mine = slice(rank * len(LENGTHS) // ranks, (rank + 1) * len(LENGTHS) // ranks)
    return hidden[:, mine], torch.cat([padding, ~padding])[:, mine]


def passed(rank: int, *, ep: int, **settings: Any) -> dict[str, Any]:
    """Tokens that came to the experts; outputs and gradients of real tokens, and of padding."""
    with model_parallel(ep=ep):
        layer = layer_of(ep=ep, **settings)
        hidden, kinds = rows(ep, rank)
        real = ~kinds.chunk(2)[0]
        hidden = hidden.clone().requires_grad_()
        came: list[int] = []
        layer.experts.register_forward_pre_hook(lambda _, inputs: came.append(len(inputs[0])))
        output, _ = layer(hidden, padding_mask=kinds.T)
        output[real].square().sum().backward()
        assert hidden.grad is not None
        return {
            "came": sum(came),
            "experts": {
                layer.local_expert_indices[number]: [each.grad for each in expert.parameters()]
                for number, expert in enumerate(layer.experts.local_experts)
            },
            "router": layer.router.weight.grad,
            "output": output.detach()[real].unsqueeze(1),
            "input": hidden.grad[real].unsqueeze(1),
            "padding": (output.detach()[~real], hidden.grad[~real]),
        }


@pytest.mark.parametrize("settings", [{}, BALANCED], ids=["plain", "balanced"])
@pytest.mark.parametrize(
    ("ep", "dispatcher"), [(1, "alltoall"), (2, "alltoall"), (2, "allgather"), (1, "allgather")]
)
def test_experts_get_real_tokens_alone(ep: int, dispatcher: str, settings: dict[str, Any]) -> None:
    settings = settings | {"moe_token_dispatcher_type": dispatcher}
    ranks = run_ranks(passed, ep, ep=ep, **settings)
    # Each replica's rows by themselves, with all experts: a balancing loss is of one's own.
    alone = [run_alone(ep, rank, settings) for rank in range(ep)]
    assert sum(each["came"] for each in ranks) == TOP * sum(LENGTHS)
    for found, expected in zip(ranks, alone, strict=True):
        for name in ("output", "input", "router"):
            assert_near(found[name], expected[name])
        assert not any(each.any() for each in found["padding"])
        for expert, gradients in found["experts"].items():
            for number, gradient in enumerate(gradients):
                whole = sum(each["experts"][expert][number] for each in alone)
                assert_near(gradient, whole)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Up to sums in another order."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def run_alone(ranks: int, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    (found,) = run_ranks(of_real_tokens, 1, ranks=ranks, of=rank, settings=settings)
    return found


def of_real_tokens(_: int, *, ranks: int, of: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank makes of the real tokens of a rank's rows, with nothing else beside them."""
    with model_parallel():
        layer = layer_of(ep=1, **settings)
        hidden, kinds = rows(ranks, of)
        hidden = hidden[~kinds.chunk(2)[0]].unsqueeze(1).clone().requires_grad_()
        kinds = torch.tensor([[False], [True]]).repeat_interleave(len(hidden), dim=0)
        output, _ = layer(hidden, padding_mask=kinds.T)
        output.square().sum().backward()
        return {
            "experts": [
                [each.grad for each in one.parameters()] for one in layer.experts.local_experts
            ],
            "router": layer.router.weight.grad,
            "output": output.detach(),
            "input": hidden.grad,
        }


def capacities(rank: int, *, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens each expert takes, with padding and of the real tokens alone; the real ones."""
    with model_parallel():
        router = layer_of(ep=1, moe_expert_capacity_factor=factor).router
        hidden, kinds = rows(1, 0)
        real = ~kinds.chunk(2)[0]
        _, padded = router(hidden, kinds)
        alone = hidden[real].unsqueeze(1)
        _, expected = router(alone, None)
        return padded, expected, real.flatten()


def test_padding_takes_none_of_an_expert_s_capacity() -> None:
    ((padded, expected, real),) = run_ranks(capacities, 1, factor=0.6)
    assert not padded[~real].any()
    assert torch.equal(padded[real], expected)
    assert expected.sum() < TOP * sum(LENGTHS)  # some were dropped
