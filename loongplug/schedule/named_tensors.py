"""Layers that offload named activations, and how these are found in any layer."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from loongplug.models.multimodal import MultimodalModel
from loongplug.schedule.tensor_names import PLACES
from loongplug.schedule.tensor_offload import LayerTensors, TensorOffload


def offload_layers(chunk: MultimodalModel, offload: TensorOffload) -> None:
    """From now on the decoder layers' forward lets go of the tensors that ``offload`` names.

    Raises:
        ValueError: no layer of the chunk has such a tensor.
    """
    decoder = chunk.text_decoder.decoder
    for name in sorted(offload.names):
        watched = [_watch(layer, name, offload) for layer in decoder.layers]
        if watched and not any(watched):
            raise ValueError(
                f"--offload-tensors {name}: no decoder layer has a tensor of that name (norms that "
                "TransformerEngine fuses into linears give none, and dense layers have no experts);"
                " drop it"
            )
    next_layer: list[Callable[[], LayerTensors]] = []  # of the pass that has begun

    def begin(module: nn.Module, args: Any) -> None:
        next_layer[:] = [offload.begin_pass()]

    decoder.register_forward_pre_hook(begin)
    for layer in decoder.layers:
        layer.forward = _leaving(layer.forward, next_layer)


def _watch(layer: nn.Module, name: str, offload: TensorOffload) -> bool:
    place = PLACES[name]
    # A norm that is fused into the linear behind it is still given what the linear gets.
    found = [
        each
        for each in _found(layer, place.module)
        if place.given or not isinstance(each, IdentityOp)
    ]

    def given(module: nn.Module, args: tuple[Any, ...]) -> None:
        offload.name(name, args[0])

    def gives(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        assert isinstance(first, Tensor)
        offload.name(name, first)

    for module in found:
        if place.given:
            module.register_forward_pre_hook(given)
        else:
            module.register_forward_hook(gives)
    return bool(found)


def _found(layer: nn.Module, wanted: str) -> Iterator[nn.Module]:
    for name, module in layer.named_modules():
        ends = name.startswith("mlp.") and name.endswith(wanted)
        if ends if wanted.startswith(".") else name == wanted:
            yield module


def _leaving(
    forward: Callable[..., Any], next_layer: list[Callable[[], LayerTensors]]
) -> Callable[..., Any]:
    @wraps(forward)
    def with_leaving(*args: Any, **kwargs: Any) -> Any:
        tensors = next_layer[0]()
        with tensors.forward():
            output = forward(*args, **kwargs)
        tensors.forward_done()
        return output

    return with_leaving
