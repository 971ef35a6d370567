"""Adapters' first values, and the weights that they are merged into."""

import zlib
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from loongplug.checkpoint.hf_gather import WeightOf, loaded_weight
from loongplug.checkpoint.owned import owned_parameters
from loongplug.models.hf_slices import local_shape
from loongplug.models.lora.adapter import Adapter, adapters
from loongplug.models.lora.mapping import AdapterTable


def start_adapters(model_chunks: Sequence[nn.Module], table: AdapterTable, *, seed: int) -> None:
    """Give every ``a`` random values; every ``b`` stays zero.

    The values depend on ``seed`` and on the name of the parameter in the whole model, so they are
    the same in every layout. No collectives.
    """
    for own in owned_parameters(model_chunks, table.mapping):
        if own.parameter.device.type == "meta" or not own.name.endswith(".a"):
            continue
        (source,) = own.entry.sources
        matrix = _uniform(source.matrix, f"{seed} {own.name}")  # of experts, one's
        columns = local_shape(own.entry.row, tp=own.piece.parts)[1]
        first = own.piece.part * columns
        own.parameter.data.copy_(matrix[:, first : first + columns])


def _uniform(shape: tuple[int, ...], name: str) -> Tensor:
    """[rank, in] within 1 / sqrt(in), as a linear of torch starts."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def merged_weights(
    model_chunks: Sequence[nn.Module], *, weight_of: WeightOf = loaded_weight
) -> WeightOf:
    """``weight_of`` with the adapters of the chunks merged into what they stand beside.

    Sums are taken in float32 and rounded once; a weight without an adapter is left as it is.
    Each rank merges its own slices. No collectives.
    """
    beside: dict[nn.Parameter, Adapter] = {}
    for chunk in model_chunks:
        for adapter, linear in adapters(chunk):
            weight = linear.weight
            assert isinstance(weight, nn.Parameter)
            beside[weight] = adapter

    def merged(parameter: nn.Parameter) -> Tensor:
        weight = weight_of(parameter)
        adapter = beside.get(parameter)
        if adapter is None:
            return weight
        product = adapter.product(weight_of(adapter.a), weight_of(adapter.b))
        return (weight.float() + product).to(weight.dtype)

    return merged
