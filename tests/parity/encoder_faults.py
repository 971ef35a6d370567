"""Built-in faults of encoders: towers of images and sounds, stages, several at a time."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loongplug.hetero.operations import Cargo
from parity.built_in import Faults, around, at

SOUNDS, IMAGES = "loongplug.models.audio_transformer.encoder", "loongplug.data.processor"
WIRE = "loongplug.hetero.wire:Wire"

FAULTS = Faults()
fault = FAULTS.fault


# Towers.


@fault("the noise in the gradient of keys' bias makes full steps", spec="placement.md P1, pitfalls")
def let_the_bias_of_keys_move(rank: int) -> None:
    for tower in (SOUNDS, "loongplug.models.patch_transformer.encoder"):
        around(f"{tower}:hold_key_bias", lambda original, bias, **of: None)


@fault("silence is heard as what a convolution makes of it", spec="placement.md P1, pitfalls")
@at(f"{SOUNDS}:AudioTransformer._embed")
def hear_the_convolution_of_silence(original: Any, self: Any, unit: Any, plan: Any) -> Tensor:
    return original(self, unit, replace(plan, silent=torch.zeros_like(plan.silent)))


@fault("a sound ends in zeros, not in frames of silence", spec="placement.md P1, pitfalls")
@at(f"{SOUNDS}:AudioTransformer._embed", where=lambda self, *_: self.architecture.sizes.behind > 0)
def end_sounds_in_zeros(original: Any, self: Any, unit: Any, plan: Any) -> Tensor:
    behind, rows = self.architecture.sizes.behind, unit.rows.clone()
    for end in unit.grids[:, 2].cumsum(0).tolist():
        rows[end - behind : end] = 0.0
    return original(self, replace(unit, loaded=rows), plan)


@fault("the projector gets the layer before the feature layer", spec="placement.md P1, layer -2")
@at(
    "loongplug.models.architecture:SquareVisionArchitecture.computed_layers",
    where=lambda self: self.num_layers > 1,
)
def take_the_layer_before(original: Any, self: Any) -> int:
    layers: int = original(self)
    return max(1, layers - 1)


@fault("the patches of one token change places", spec="placement.md P1, numbers")
def turn_the_patches_of_a_token(rank: int) -> None:
    def turned(original: Any, frames: Tensor, *, patch: int, merge: int) -> Tensor:
        rows: Tensor = original(frames, patch=patch, merge=merge)
        return rows.unflatten(0, (-1, merge**2)).flip(1).flatten(0, 1)

    around(f"{IMAGES}:cut", turned, where=lambda frames, *, patch, merge: merge > 1)


@fault("the tiles of an image change places", spec="placement.md P1, numbers")
@at(f"{IMAGES}:cut", where=lambda frames, **_: len(frames) > 1)
def turn_the_tiles_of_an_image(original: Any, frames: Tensor, **size: int) -> Any:
    return original(frames.flip(0), **size)


# Between the stages of an encoder.


@fault("a stage gets the states of the unit before", spec="placement.md P3, stages")
def take_states_of_the_unit_before(rank: int) -> None:
    _take_the_unit_before(Cargo.STATES)


@fault("a stage gets the gradient of the unit before", spec="placement.md P3, stages")
def take_back_the_unit_before(rank: int) -> None:
    _take_the_unit_before(Cargo.STATE_GRADIENTS)


def _take_the_unit_before(kind: Cargo) -> None:
    """As far as that has the rows."""
    kept: list[Tensor] = []

    def taken(original: Any, self: Any, what: Cargo, unit: int) -> Tensor:
        found: Tensor = original(self, what, unit)
        kept.append(found.clone())
        before = kept[max(0, len(kept) - 2)]
        rows = min(len(before), len(found))
        return torch.cat([before[:rows], found[rows:]])

    around(f"{WIRE}.receive", taken, where=lambda self, what, unit: what is kind)


@fault("gradients of taps do not go back to the stage before", spec="placement.md P3, stages")
@at(
    "loongplug.models.encoder:HandedOn.unpacked",
    where=lambda cls, payload, *, hidden, **_: payload.shape[1] > hidden,
)
def lose_the_taps_between_stages(original: Any, cls: type, payload: Tensor, **of: Any) -> Any:
    found = original(cls, payload, **of)
    return replace(found, taps=tuple(each.detach() for each in found.taps))


@fault("a later stage has the weights of the first one's layers", spec="placement.md P3, offsets")
def count_the_layers_of_a_stage(rank: int) -> None:
    def behind_the_first(modules: Any) -> bool:
        return any(
            "encoder." in name and name.endswith(".layers.0") and module.layer_number > 1
            for name, module in modules.items()
        )

    def from_zero(original: Any, modules: Any) -> dict[str, int]:
        found: dict[str, int] = original(modules)
        return {name: 0 if "encoder." in name else each for name, each in found.items()}

    around(
        "loongplug.checkpoint.parameter_holders:_layer_offsets", from_zero, where=behind_the_first
    )


# Of several encoders, and of the ranks of one.


@fault("one of two encoders gets no gradient back", spec="placement.md P3, join")
@at(
    "loongplug.hetero.encoder_of_step:EncoderOfStep.backward",
    where=lambda self, *_, **__: self._entry.name == "audio_encoder",
)
def lose_the_gradient_of_sounds(
    original: Any, self: Any, payload: Tensor, gradient: Tensor, **more: Any
) -> None:
    original(self, payload, gradient * 0.0, **more)


@fault("a unit's sounds arrive with their last row first", spec="placement.md P3, join")
@at(
    "loongplug.hetero.executor:Executor.taken",
    where=lambda self, _: self.entry.name == "audio_encoder",
)
def turn_the_rows_of_sounds(original: Any, self: Any, unit: int) -> Tensor:
    found: Tensor = original(self, unit)
    return found.flip(0)


@fault("an encoder's gradients of parts are averaged, not summed", spec="context-parallel.md C1")
@at(
    "loongplug.hetero.placement:Placement.gradient_factor",
    where=lambda self, name: self._consumer_of(name).layout.cp > 1,
)
def average_the_parts(original: Any, self: Any, name: str) -> float:
    factor: float = original(self, name)
    return factor / self._consumer_of(name).layout.cp


@fault("features go where a zigzag's tokens would lie", spec="context-parallel.md C2, balanced")
@at(
    "loongplug.models.decoder:token_places",
    where=lambda *_, held, **__: not np.array_equal(held.starts, _of_a_zigzag(held).starts),
)
def place_features_by_a_zigzag(original: Any, places: Any, *, held: Any, **of: Any) -> Any:
    return original(places, held=_of_a_zigzag(held), **of)


def _of_a_zigzag(held: Any) -> Any:
    """This rank's part of the row, if all rows were split alike."""
    from megatron.core import parallel_state

    from loongplug.context.token_split import zigzag

    ranks = parallel_state.get_context_parallel_world_size()
    parts = zigzag(ranks * held.tokens, cp=ranks).parts
    return parts[parallel_state.get_context_parallel_rank()]
