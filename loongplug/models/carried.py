"""Tensors of an encoder's files that never train, as parameters under names of their own.

They are parameters, so that checkpoints, imports and exports have them, and frozen whatever anyone
asks for: see :func:`loongplug.models.hf_mapping.is_carried`.
"""

from collections.abc import Mapping

import torch
from torch import nn

from loongplug.models.hf_mapping import Shape, leading_axes, parameter_name


class Carried(nn.Module):
    """Tensors by their names in the files, frozen, zero until a file fills them.

    Every tensor parallel rank has them whole. Not to be called.
    """

    def __init__(self, tensors: Mapping[str, Shape]) -> None:
        super().__init__()
        for name, shape in tensors.items():
            values = torch.zeros(shape[leading_axes(shape) :])
            self.register_parameter(parameter_name(name), nn.Parameter(values, requires_grad=False))
