"""Experts and their router: first weights, shared experts, and what routers know of tokens."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from layer_configs import decoder_config
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from ranks import model_parallel, run_ranks

from loongplug.models.layers.inputs import pack_segments
from loongplug.models.layers.router import balances, token_kinds
from loongplug.models.layers.specs import decoder_layer_spec


def experts_config(**overrides):
    values = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 20,
        "use_cpu_initialization": True,
    }
    return decoder_config(**(values | overrides))


def layer_of(config):
    spec = decoder_layer_spec(config, backend="local")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=groups).mlp


def first_weights(rank, *, ep):
    with model_parallel(ep=ep):
        layer = layer_of(experts_config(expert_model_parallel_size=ep))
        assert not any(parameter.allreduce for parameter in layer.experts.parameters())
        return [expert.linear_fc1.weight.detach().clone() for expert in layer.experts.local_experts]


@pytest.mark.parametrize("ep", [1, 2])
def test_no_two_experts_start_alike_and_replicas_do(ep):
    ranks = run_ranks(first_weights, 4, ep=ep)
    experts = [weight for rank in ranks[:ep] for weight in rank]
    assert len(experts) == 4
    for number, weight in enumerate(experts):
        assert not any(torch.equal(weight, other) for other in experts[:number])
    for rank in range(4):
        assert all(map(torch.equal, ranks[rank], ranks[rank % ep]))


def with_shared_experts(*, tp, **more):
    return experts_config(
        moe_shared_expert_intermediate_size=12,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_tensor_parallel_size=1,
        **more,
    )


def beside_shared_experts(rank, *, tp, hidden):
    """The layer's output without what the shared experts add, and with it; their weights."""
    with model_parallel(tp=tp, etp=1):
        layer = layer_of(with_shared_experts(tp=tp))
        assert all(getattr(each, "allreduce", True) for each in layer.shared_experts.parameters())
        own = hidden.chunk(tp)[rank]
        whole, _ = layer(own)
        layer.use_shared_expert = False
        routed, _ = layer(own)
        weights = [linear.weight.detach() for linear in _linears(layer.shared_experts)]
        return (whole - routed).detach(), weights


def _linears(mlp):
    return mlp.linear_fc1, mlp.linear_fc2


@pytest.mark.parametrize("tp", [1, 2])
def test_every_token_goes_through_the_shared_experts_too(tp):
    hidden = torch.randn(6, 1, 24, generator=torch.Generator().manual_seed(0))  # [s, b, hidden]
    ranks = run_ranks(beside_shared_experts, tp, tp=tp, hidden=hidden)
    first, second = zip(*(weights for _, weights in ranks), strict=True)
    gate, up = (torch.cat(half) for half in zip(*(each.chunk(2) for each in first), strict=True))
    expected = F.linear(
        F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), torch.cat(second, dim=1)
    )
    torch.testing.assert_close(torch.cat([added for added, _ in ranks]), expected)


def beside_the_exchange(rank, *, hidden):
    """Output and all gradients of a layer, without and with ``--moe-shared-expert-overlap``."""
    found = []
    for overlap in (False, True):
        with model_parallel(tp=2, ep=2, etp=1):
            torch.manual_seed(1)
            config = with_shared_experts(
                tp=2,
                expert_model_parallel_size=2,
                moe_shared_expert_overlap=overlap,
                moe_token_dispatcher_type="alltoall",
            )
            layer = layer_of(config)
            own = hidden.chunk(2)[rank].clone().requires_grad_()
            output, _ = layer(own)
            output.square().sum().backward()
            found.append([output.detach(), own.grad, *(each.grad for each in layer.parameters())])
    return found


def test_shared_experts_beside_the_exchange_give_the_same():
    hidden = torch.randn(6, 1, 24, generator=torch.Generator().manual_seed(0))  # [s, b, hidden]
    for without, beside in run_ranks(beside_the_exchange, 2, hidden=hidden):
        assert all(each.any() for each in without)
        for one, other in zip(without, beside, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.quick
def test_token_kinds_are_padding_and_what_counts():
    positions = torch.tensor([[[0, 1, 2, 0, 0]], [[0, 0, 2, 0, 0]], [[0, 0, 0, 0, 0]]])
    kinds = token_kinds(positions, torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]))
    assert kinds.int().tolist() == [[0, 0, 0, 1, 1, 0, 1, 0, 0, 0]]


@pytest.mark.quick
@pytest.mark.parametrize("padding", [0, 2])
def test_a_pack_says_itself_what_its_padding_is(padding):
    length = 5 + padding
    positions = torch.tensor([0, 1, 0, 1, 2] + [0] * padding).expand(3, 1, length)
    packed = pack_segments([2, 3], device="cpu", padding=padding)
    kinds = token_kinds(positions, torch.zeros(1, length), packed=packed)
    assert kinds[0, :length].int().tolist() == [0] * 5 + [1] * padding
    assert not kinds[0, length:].any()


@pytest.mark.quick
def test_balances():
    settings = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    assert not balances(SimpleNamespace(**settings))
    assert not balances(SimpleNamespace(**settings | {"moe_aux_loss_coeff": [0.0, 0.0]}))
    assert balances(SimpleNamespace(**settings | {"moe_aux_loss_coeff": [0.0, 0.1]}))
    assert balances(SimpleNamespace(**settings | {"moe_aux_loss_coeff": 0.1}))
    assert balances(SimpleNamespace(**settings | {"moe_z_loss_coeff": 0.1}))
    assert not balances(SimpleNamespace(**settings | {"num_moe_experts": None}))
