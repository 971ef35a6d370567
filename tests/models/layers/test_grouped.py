"""Experts at once and one by one: the same outputs and gradients."""

from types import SimpleNamespace

import pytest
import torch
from layer_configs import decoder_config
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from ranks import model_parallel, run_ranks

from loongplug.models.layers import grouped, linear
from loongplug.models.layers.grouped import Groups, JoinedExperts, kernel_takes, watched
from loongplug.models.layers.specs import decoder_layer_spec

HIDDEN = 16
COUNTS = {
    "uneven": [3, 8, 1, 12],
    "some-without": [0, 7, 0, 2],
    "one-token": [0, 0, 1, 0],
    "none": [0, 0, 0, 0],
}


def experts_of(*, delayed=False, dtype=torch.float32, **overrides):
    values = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "hidden_size": HIDDEN,
        "moe_ffn_hidden_size": 24,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "params_dtype": dtype,
    }
    config = decoder_config(**(values | overrides))
    config.delay_wgrad_compute = delayed  # upstream lets only its whole schedule ask for it
    spec = decoder_layer_spec(config, backend="local")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=groups).mlp.experts


def inputs(count, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(count, HIDDEN, generator=generator).to(dtype).requires_grad_()
    probabilities = torch.rand(count, generator=generator).requires_grad_()
    return tokens, probabilities, torch.randn(count, HIDDEN, generator=generator).to(dtype)


def everything(forward, experts, counts, *, dtype=torch.float32, delayed=False):
    """Output, and the gradients of tokens, probabilities and all weights (None where frozen)."""
    tokens, probabilities, gradient = inputs(sum(counts), dtype=dtype)
    experts.zero_grad()
    output, bias = forward(tokens, torch.tensor(counts), probabilities)
    assert bias is None
    output.backward(gradient)
    if delayed:
        assert all(weight.grad is None for weight in experts.parameters())
        experts.backward_dw()
    weights = [weight.grad for weight in experts.parameters()]
    return [output.detach(), tokens.grad, probabilities.grad, *weights]


def one_by_one(experts, counts, **options):
    experts.joined = False
    try:
        return everything(experts, experts, counts, **options)
    finally:
        experts.joined = True


def by_kernel(experts):
    """The layer's forward as it is where torch has a kernel."""

    def forward(tokens, counts, probabilities):
        each = list(experts.local_experts)
        groups = Groups.of(counts.tolist(), tokens, kernel=True)
        return JoinedExperts(each, groups)(tokens, probabilities)

    return forward


def compared(rank, *, counts, dtype, kernel, delayed=False, frozen=(), **overrides):
    with model_parallel():
        experts = experts_of(dtype=dtype, delayed=delayed, **overrides)
        assert experts.joined
        for number in frozen:
            experts.local_experts[number].requires_grad_(False)
        options = {"dtype": dtype, "delayed": delayed}
        expected = one_by_one(experts, counts, **options)
        forward = by_kernel(experts) if kernel else experts
        return expected, everything(forward, experts, counts, **options)


def assert_same(found, *, bits):
    for one, other in zip(*found, strict=True):
        if one is None or other is None:
            assert one is other
        elif bits:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("delayed", [False, True])
def test_large_products_are_those_of_experts_one_by_one(delayed, monkeypatch):
    monkeypatch.setattr(linear, "_LARGE", 1)
    found = run_ranks(
        compared, 1, counts=COUNTS["uneven"], dtype=torch.float32, kernel=False, delayed=delayed
    )
    assert_same(found[0], bits=True)


@pytest.mark.parametrize("kernel", [False, True], ids=["loop", "kernel"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_outputs_and_all_gradients_are_those_of_experts_one_by_one(counts, kernel):
    (found,) = run_ranks(compared, 1, counts=counts, dtype=torch.float32, kernel=kernel)
    assert_same(found, bits=not kernel)
    assert found[0][0].any() == (sum(counts) > 0)


CASES = {
    "bf16": {"dtype": torch.bfloat16},
    "frozen": {"frozen": (0, 3)},
    "all-frozen": {"frozen": (0, 1, 2, 3)},
    "delayed": {"delayed": True},
    "clamped": {"activation_func_clamp_value": 0.1},
    "fused-activation": {"bias_activation_fusion": True},
}


@pytest.mark.parametrize("kernel", [False, True], ids=["loop", "kernel"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_with(case, kernel):
    settings = {"dtype": torch.float32, "counts": [5, 0, 2, 9], "kernel": kernel} | case
    (found,) = run_ranks(compared, 1, **settings)
    # Of a tensor that is not read row by row, the last values are computed without vectors.
    assert_same(found, bits=not kernel and "activation" not in " ".join(case))


def hooked(rank):
    with model_parallel():
        experts = experts_of()
        each = list(experts.local_experts)
        plain = everything(experts, experts, [2, 3, 0, 1])[0]
        asked = []

        def waits(module, *unused):
            asked.append(module)

        waits.__module__ = "megatron.core.distributed.distributed_data_parallel"
        linears = [each for expert in each for each in (expert.linear_fc1, expert.linear_fc2)]
        handles = [linear.register_forward_pre_hook(waits) for linear in linears]
        assert not watched(each)
        again = everything(experts, experts, [2, 3, 0, 1])[0]
        assert torch.equal(again, plain)
        assert set(asked) == set(linears)
        for handle in handles:
            handle.remove()
        each[3].linear_fc2.register_forward_hook(lambda _, __, output: (output[0] * 2, None))
        assert watched(each)
        doubled = everything(experts, experts, [2, 3, 0, 1])[0]
        assert torch.equal(doubled[:5], plain[:5])
        assert torch.equal(doubled[5:], plain[5:] * 2)
        each[3].linear_fc2._forward_hooks.clear()
        each[0].linear_fc2.register_forward_pre_hook(lambda _, given: (given[0] * 0,))
        assert not everything(experts, experts, [2, 3, 0, 1])[0][:2].any()


def test_hooks_at_linears_are_heard():
    run_ranks(hooked, 1)


def mlp_with(*, ffn, dtype=torch.bfloat16):
    first, second = torch.zeros(2 * ffn, HIDDEN, dtype=dtype), torch.zeros(HIDDEN, ffn, dtype=dtype)
    return SimpleNamespace(
        linear_fc1=SimpleNamespace(weight=first), linear_fc2=SimpleNamespace(weight=second)
    )


@pytest.mark.quick
def test_what_the_kernel_takes(monkeypatch):
    def on_gpu(dtype=torch.bfloat16):
        return SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda")

    capability = [(9, 0)]
    monkeypatch.setattr(grouped.torch.cuda, "get_device_capability", lambda _: capability[0])
    assert kernel_takes([mlp_with(ffn=24)], on_gpu())
    assert not kernel_takes([mlp_with(ffn=20)], on_gpu())  # rows of 40 bytes
    assert not kernel_takes([mlp_with(ffn=24)], on_gpu(torch.float32))
    assert not kernel_takes([mlp_with(ffn=24, dtype=torch.float32)], on_gpu())
    assert not kernel_takes([mlp_with(ffn=24)], torch.zeros(3, HIDDEN, dtype=torch.bfloat16))
    with monkeypatch.context() as patched:
        patched.setattr(grouped, "grouped_product", lambda: None)  # a torch without it
        assert not kernel_takes([mlp_with(ffn=24)], on_gpu())
    capability[0] = (7, 5)
    assert not kernel_takes([mlp_with(ffn=24)], on_gpu())


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_on_a_gpu_the_kernel_gives_what_the_loop_gives(counts):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)

    tokens, gradient = draw(sum(counts), HIDDEN), draw(sum(counts), 24)
    weights = [draw(24, HIDDEN) for _ in counts]
    found = []
    for kernel in (False, True):
        groups = Groups.of(counts, tokens, kernel=kernel)
        assert (groups.ends is not None) == (kernel and sum(counts) > 0)
        found.append(
            [
                groups.forward(tokens, weights),
                groups.back(gradient, weights),
                *groups.of_weights(tokens, gradient, [True] * len(counts)),
            ]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1.6e-2, atol=1e-2)
