"""The names by which a user knows parameters: the same in every layout and with every backend."""

from collections.abc import Iterator, Sequence

from torch import nn

from loongplug.checkpoint.owned import global_entry, layer_offsets, without_wrappers
from loongplug.models.hf_mapping import Mapping, shift_layers


def parameter_names(
    model_chunks: Sequence[nn.Module], mapping: Mapping
) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters with their names in the whole model; no collectives.

    Layers and experts are counted over the whole model. Where backends keep a parameter in
    different modules, and where stages keep copies of it (tied embeddings), it has the mapping's
    first name for it; what the mapping does not know (an adapter) has its own.
    """
    for chunk in model_chunks:
        modules = {without_wrappers(name): module for name, module in chunk.named_modules()}
        offsets = layer_offsets(modules)
        for wrapped_name, parameter in chunk.named_parameters():
            local_name = without_wrappers(wrapped_name)
            shifted = shift_layers(local_name, offsets)
            found = mapping.find(shifted)
            if found is None:
                yield shifted, parameter
            else:
                yield global_entry(found, local_name, modules).name, parameter
