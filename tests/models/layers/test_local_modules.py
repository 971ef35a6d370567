"""The local linears and MLP against the upstream classes that they stand in for."""

import torch
import torch.nn.functional as F
from layer_configs import decoder_config, vision_config
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.models.layers.linear import LocalColumnParallelLinear, LocalRowParallelLinear
from loongplug.models.layers.mlp import LocalMLP


def mlp(kind: type[MLP], linears: tuple[type, type], config: TransformerConfig) -> MLP:
    return kind(config, MLPSubmodules(*linears), ffn_hidden_size=config.ffn_hidden_size)


def results(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The output with its bias added, and the gradients of input and parameters."""
    for seed, (_, parameter) in enumerate(sorted(module.named_parameters())):
        generator = torch.Generator().manual_seed(seed)
        parameter.data = torch.randn(parameter.shape, generator=generator)
    output, bias = module(x)
    if bias is not None:
        output = output + bias
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    parameters = [parameter for _, parameter in sorted(module.named_parameters())]
    return [output, *torch.autograd.grad((output * weights).sum(), [x, *parameters])]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def _mlps(rank: int) -> None:
    upstream = (ColumnParallelLinear, RowParallelLinear)
    local = (LocalColumnParallelLinear, LocalRowParallelLinear)
    with model_parallel():
        for config, plain in (
            (decoder_config(), True),
            (decoder_config(add_bias_linear=True), True),
            (decoder_config(glu_linear_offset=0.5), False),
            (decoder_config(activation_func_clamp_value=0.7), False),
            (decoder_config(activation_func=F.gelu), False),
            (decoder_config(bias_activation_fusion=True), False),
            (vision_config(), False),
            (vision_config(bias_activation_fusion=True), False),
        ):
            x = torch.randn(5, 2, config.hidden_size, requires_grad=True)
            ours = mlp(LocalMLP, local, config)
            assert ours.plain_swiglu is plain
            assert_same(results(ours, x), results(mlp(MLP, upstream, config), x))


def test_mlps_agree_with_upstreams() -> None:
    run_ranks(_mlps, 1)
