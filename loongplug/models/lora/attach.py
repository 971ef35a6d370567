"""Put adapters beside the linears of a module."""

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from loongplug.models.hf_mapping import ADAPTER
from loongplug.models.layers.recompute import input_for_recompute
from loongplug.models.lora.adapter import Adapter
from loongplug.models.lora.place import linear_place, own_input
from loongplug.models.lora.settings import LoraSettings


def add_adapters(module: nn.Module, settings: LoraSettings) -> None:
    """Give the targeted linears of ``module`` adapters, and freeze everything else in it.

    The adapter of ``x.linear_qkv`` is ``x.linear_qkv_lora``: names of other parameters stay. All
    adapters start at zero, which changes nothing in the outputs. No collectives.

    Raises:
        ValueError: a targeted linear is none that an adapter can stand beside.
    """
    module.requires_grad_(False)
    for path, linear in list(module.named_modules()):
        if settings.targets(path):
            _add_adapter(module, path, linear, settings)
    for block in module.modules():
        if isinstance(block, TransformerBlock):
            block.register_forward_pre_hook(_for_recompute, with_kwargs=True)


def _add_adapter(module: nn.Module, path: str, linear: nn.Module, settings: LoraSettings) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = module.get_submodule(parent_path)
    place = linear_place(linear, expert="experts" in path.split("."))
    if place is None:
        raise ValueError(
            f"lora.target_modules name {path}, a {type(linear).__name__}, beside which no adapter "
            "can stand: leave it out of them, or --moe-grouped-gemm where it is experts'."
        )
    gated = isinstance(parent, MLP) and parent.config.gated_linear_unit and name == "linear_fc1"
    adapter = Adapter(place, settings, gated=gated)
    parent.add_module(f"{name}{ADAPTER}", adapter)
    seen_by = own_input(linear)

    def beside(_: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        product, bias = output
        return product + adapter(seen_by(inputs[0])), bias

    linear.register_forward_hook(beside)


def _for_recompute(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Whatever family the layers are of: what is in front of them is frozen now."""
    states = kwargs.get("hidden_states")
    if isinstance(states, Tensor):
        kwargs["hidden_states"] = input_for_recompute(states, layers=block)
    return args, kwargs


def adapters(model: nn.Module) -> Iterator[tuple[Adapter, nn.Module]]:
    """Every adapter in ``model`` with the linear beside it."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield module, model.get_submodule(name.removesuffix(ADAPTER))
