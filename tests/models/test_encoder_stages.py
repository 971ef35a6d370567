"""Encoders in pipeline stages: one behind the other they are the whole one, gradients too."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import EncoderArchitecture, VisionArchitecture
from loongplug.models.encoder_stages import HandedOn, packed, payload_widths
from loongplug.models.parts import load
from loongplug.models.registry import family_of
from loongplug.training.config import compose_model

EYES, EARS = "image_encoder", "audio_encoder"
# Model, encoder, how many layers each stage has, and what else is changed.
CASES: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any]]] = {
    "taps": ("qwen3_vl_tiny", EYES, (1, 1, 1), {}),
    "taps-recomputed": ("qwen3_vl_tiny", EYES, (2, 1), {"recompute": True}),
    "windows": ("qwen2_5_vl_tiny", EYES, (3, 1), {}),
    "class-token-and-layers-behind": ("llava_tiny", EYES, (1, 1), {"feature_layer": -2}),
    "tiles": ("internvl_tiny", EYES, (1, 2), {}),
    "chunks": ("qwen2_5_omni_tiny", EARS, (1, 1), {}),
    "sounds": ("qwen2_audio_tiny", EARS, (1, 1), {}),
}


@dataclass(frozen=True)
class Stage:
    """What Megatron asks of a pipeline group."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def sizes_of(architecture: EncoderArchitecture, sizes: tuple[int, ...]) -> EncoderArchitecture:
    """With so many layers, in stages of ``sizes``."""
    behind = architecture.num_layers - architecture.computed_layers
    more: dict[str, Any] = {"num_layers": sum(sizes) + behind}
    return dataclasses.replace(
        architecture, pipeline_model_parallel_size=len(sizes), stage_layers=sizes, **more
    )


def media_of(architecture: EncoderArchitecture) -> MediaInput:
    """Two media of different sizes where they may differ."""
    if not isinstance(architecture, VisionArchitecture):
        sizes: Any = architecture
        grids = [sizes.sizes.grid(each) for each in (173, 40)]
    elif architecture.one_size:
        side = sizes_side(architecture)
        grids = [(1, side, side), (2, side, side)]
    else:
        grids = [(1, 4, 6), (2, 2, 4)]
    rows = sum(torch.Size(grid).numel() for grid in grids)
    generator = torch.Generator().manual_seed(4)
    return MediaInput(
        rows=torch.randn(rows, architecture.row_values, generator=generator),
        grids=torch.tensor(grids),
    )


def sizes_side(architecture: Any) -> int:
    return int(architecture.side)


def built(model: Any, name: str, architecture: EncoderArchitecture, pp: Stage) -> Any:
    """The encoder on a stage."""
    decoder = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = pp  # type: ignore[assignment]
    part = family_of(model).parts_of(model)[name]
    return load(part.build)(architecture, decoder=decoder, groups=groups, backend="local")


def of_whole(stage: Any) -> Iterator[tuple[str, Tensor]]:
    """A stage's parameters by their names in the whole encoder."""
    start = stage.stage.layers.start
    for name, parameter in stage.named_parameters():
        yield (
            re.sub(
                r"^blocks\.layers\.(\d+)",
                lambda found: f"blocks.layers.{int(found[1]) + start}",
                name,
            ),
            parameter,
        )


def compose(_: int, *, case: str, frozen: bool = False) -> dict[str, float]:
    """Differences of stages from the whole, by what they are; ``frozen``: the first stage."""
    name, encoder, sizes, changes = CASES[case]
    model = compose_model(model_name=name).config
    architecture = dataclasses.replace(model.encoder(encoder), **changes)
    staged = sizes_of(architecture, sizes)
    alone = dataclasses.replace(staged, pipeline_model_parallel_size=1, stage_layers=None)
    media = media_of(staged)
    with model_parallel():
        torch.manual_seed(5)
        whole = built(model, encoder, alone, Stage(0, 1))
        for parameter in whole.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        weights = dict(whole.named_parameters())
        states, taps = whole(media)
        expected = packed(states, taps)
        factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(6))
        (expected * factors).sum().backward()

        found, given, seen, ends = {}, media, [], []
        for number, width in zip(range(len(sizes)), (*payload_widths(staged), 0), strict=True):
            parallel_state.set_pipeline_model_parallel_rank(number)
            stage = built(model, encoder, staged, Stage(number, len(sizes)))
            for own, parameter in of_whole(stage):
                parameter.data.copy_(weights[own])
            if frozen and number == 0:
                stage.requires_grad_(False)
            payload = packed(*stage(given))
            seen.append(stage)
            ends.append((given, payload))
            if number < len(sizes) - 1:
                assert payload.shape == (
                    sum(map(staged.states, media.grids.tolist())),
                    width,
                ), payload.shape
                leaf = payload.detach().requires_grad_(not (frozen and number == 0))
                found[number] = leaf
                given = HandedOn.unpacked(leaf, grids=media.grids, hidden=staged.hidden_size)  # type: ignore[assignment]
        differences = {"features": (payload - expected).abs().max().item()}
        gradient = factors
        for number in reversed(range(len(sizes))):
            parallel_state.set_pipeline_model_parallel_rank(number)
            if frozen and number == 0:
                assert not ends[number][1].requires_grad
                break
            ends[number][1].backward(gradient)
            if number and not (frozen and number == 1):
                gradient = found[number - 1].grad
        names = [own for stage in seen for own, _ in of_whole(stage)]
        assert sorted(names) == sorted(weights), "each parameter lies on one stage"
        for stage in seen[frozen:]:
            for own, parameter in of_whole(stage):
                wanted = weights[own].grad
                assert (parameter.grad is None) == (wanted is None), own
                if wanted is not None:
                    scale = wanted.abs().max().item() or 1.0
                    differences[own] = (parameter.grad - wanted).abs().max().item() / scale
        for stage in seen[1:]:
            blank = stage.blank_unit()
            assert isinstance(blank, HandedOn)
            parallel_state.set_pipeline_model_parallel_rank(stage.stage.number)
            output = packed(*stage(blank))
            assert output.isfinite().all()
            assert output.requires_grad
        return differences


@pytest.mark.parametrize("case", CASES)
def test_stages_are_the_whole(case: str) -> None:
    (differences,) = run_ranks(compose, 1, case=case)
    assert len(differences) > 10
    assert max(differences.values()) < 1e-4, differences


def test_a_frozen_first_stage_gets_no_gradient() -> None:
    (differences,) = run_ranks(compose, 1, case="taps", frozen=True)
    assert max(differences.values()) < 1e-4, differences
    assert not any(".layers.0." in name or "patch_embed" in name for name in differences)


@pytest.mark.parametrize(
    ("layers", "stages", "given", "expected"),
    [
        (7, 3, None, (3, 2, 2)),
        (4, 4, None, (1, 1, 1, 1)),
        (5, 1, None, (5,)),
        (5, 2, (1, 4), (1, 4)),
    ],
)
def test_layers_are_spread_as_evenly_as_can_be(
    layers: int, stages: int, given: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    encoder = compose_model(model_name="qwen3_vl_tiny").config.image_encoder
    own = {"num_layers": layers, "pipeline_model_parallel_size": stages, "stage_layers": given}
    assert dataclasses.replace(encoder, **own).layers_of_stages == expected
