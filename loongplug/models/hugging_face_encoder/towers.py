"""What a tower of ``transformers`` is made of, found out without its memory or arithmetic.

A tower is built and run on the meta device: which parameters it has, what files call them, and
which of them its features come from. Which of them change nothing, a small likeness shows.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig


@dataclass(frozen=True, kw_only=True)
class Tower:
    """By the name of each parameter in the tower, its shape and its name in files.

    No feature comes from the ``carried`` ones: they get no gradient, whatever the images, or have
    no values. The ``idle`` ones change no feature although all are computed with them, as biases of
    keys that no position turns: their gradient is rounding. ``class_token``: an image has a state
    before those of its patches.
    """

    shapes: Mapping[str, tuple[int, ...]]
    in_files: Mapping[str, str]
    carried: frozenset[str]
    idle: frozenset[str]
    class_token: bool


def make_tower(vision: HuggingFaceEncoderConfig) -> nn.Module:
    """The encoder itself in fp32, on torch's default device, as it starts in transformers."""
    from transformers import AutoModel

    try:
        tower: nn.Module = AutoModel.from_config(
            copy.deepcopy(vision.in_transformers), dtype=torch.float32, trust_remote_code=False
        )
    except ValueError as error:
        raise ValueError(
            f"transformers has no model for model_type {vision.model_type!r} "
            f"({' '.join(str(error).split()):.200}): give that of an image encoder"
        ) from error
    # No dropout, as in all encoders here, and no positions moved at random.
    return tower.eval()


def states_of(tower: nn.Module, images: Tensor, *, vision: HuggingFaceEncoderConfig) -> Tensor:
    """The feature layer's states of ``images`` [images, channels, height, width].

    They are [images, tokens, hidden], of the patches row by row, a class token's before them.
    """
    given: Any = tower(pixel_values=images, output_hidden_states=True, return_dict=True)
    return given.hidden_states[vision.feature_layer]


def look_at(vision: HuggingFaceEncoderConfig) -> Tower:
    """The tower of an encoder: parameters, their names in files, which of them change features."""
    vision.require_feature_layer()
    with torch.device("meta"):
        tower = make_tower(vision)
    _check_state(tower)
    tokens = _run_once(tower, vision)
    patches = vision.side**2
    if tokens not in (patches, patches + 1):
        raise ValueError(
            f"{type(tower).__name__} of transformers gives {tokens} states of an image of "
            f"{patches} patches: expected one for each, with at most a class token before them"
        )
    carried = frozenset(
        name for name, each in tower.named_parameters() if each.grad is None or each.numel() == 0
    )
    idle = _idle_kinds(vision)
    return Tower(
        shapes={name: tuple(each.shape) for name, each in tower.named_parameters()},
        in_files=_names_in_files(tower),
        carried=carried,
        idle=frozenset(
            name
            for name, _ in tower.named_parameters()
            if _without_numbers(name) in idle and name not in carried
        ),
        class_token=tokens > patches,
    )


def _check_state(tower: nn.Module) -> None:
    """Raise ValueError where files have more than parameters, or parameters without an axis."""
    known = dict(tower.named_parameters())
    scalars = {name for name, each in known.items() if each.dim() == 0}
    if more := sorted((tower.state_dict().keys() - known.keys()) | scalars):
        raise ValueError(
            f"{type(tower).__name__} of transformers keeps {', '.join(more[:3])} in its files: "
            "only an encoder whose files have parameters alone, each of them once and with an "
            "axis, can be taken"
        )


def _run_once(tower: nn.Module, vision: HuggingFaceEncoderConfig) -> int:
    """Give gradients to the parameters that features come from; the tokens of an image."""
    pixels = vision.side * vision.patch_size
    blank = torch.zeros(1, vision.in_channels, pixels, pixels, device="meta")
    try:
        with torch.enable_grad():
            states = states_of(tower, blank, vision=vision)
            states.sum().backward()
    except Exception as error:  # whatever a model does not take
        raise ValueError(
            f"{type(tower).__name__} of transformers gives no hidden states of an image of "
            f"{pixels} x {pixels} pixels ({' '.join(str(error).split()):.200}): give an encoder of "
            "images alone, with an image_size that its patch_size divides"
        ) from error
    if states.dim() != 3 or states.shape[2] != vision.hidden_size:
        raise ValueError(
            f"{type(tower).__name__} of transformers gives states of shape {list(states.shape)}: "
            f"expected [images, tokens, {vision.hidden_size}]"
        )
    return states.shape[1]


def _idle_kinds(vision: HuggingFaceEncoderConfig) -> frozenset[str]:
    """The idle parameters by names without numbers, seen on a small likeness in fp64."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        likeness = vision.likeness()
        tower = make_tower(likeness).double()
        with torch.no_grad():
            for parameter in tower.parameters():
                parameter.normal_(std=0.3)
        images = torch.randn(2, likeness.in_channels, 4, 4, dtype=torch.float64)
        with torch.enable_grad():
            states = states_of(tower, images, vision=likeness)
            (states * torch.randn_like(states)).sum().backward()
    sizes = {
        name: each.grad.abs().max().item()
        for name, each in tower.named_parameters()
        if each.grad is not None and each.numel()
    }
    rounding = 1e-10 * max(sizes.values())
    return frozenset(_without_numbers(name) for name, size in sizes.items() if size < rounding)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _names_in_files(tower: nn.Module) -> dict[str, str]:
    """What transformers calls each parameter when it saves a model."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(tower.named_parameters())
    saved = revert_weight_conversion(tower, dict(parameters))
    names = {id(tensor): name for name, tensor in saved.items()}
    if names.keys() != {id(each) for each in parameters.values()}:
        raise ValueError(
            f"{type(tower).__name__} of transformers is saved with other tensors than it has: give "
            "an encoder whose parameters are in its files as they are"
        )
    return {name: names[id(each)] for name, each in parameters.items()}
