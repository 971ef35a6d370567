"""What encoders make of media's sizes goes to the device once, and is the same when it is kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from host_waits import META, no_waits
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import model_parallel, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import VisionArchitecture
from loongplug.models.parts import load
from loongplug.models.registry import family_of
from loongplug.training.config import compose_model

EYES, EARS = "image_encoder", "audio_encoder"
# Model, encoder, how many copies a forward takes, and how many the first one takes besides. What
# stays: the ends of segments, of both kinds for windows; how far each frame's order is moved; and
# where sounds lie, which depends on all of a unit's.
CASES: dict[str, tuple[str, str, int, int]] = {
    "taps": ("qwen3_vl_tiny", EYES, 1, 3 * 2),
    "windows": ("qwen2_5_vl_tiny", EYES, 3, 2 * 2),
    "class-token": ("llava_tiny", EYES, 1, 1),
    "sounds": ("qwen2_audio_tiny", EARS, 6, 0),
    "chunks": ("qwen2_5_omni_tiny", EARS, 6, 1),
}


def media_of(architecture: Any) -> MediaInput:
    """Two media of different sizes where they may differ."""
    if not isinstance(architecture, VisionArchitecture):
        grids = [architecture.sizes.grid(each) for each in (173, 40)]
    elif architecture.one_size:
        side = architecture.side
        grids = [(1, side, side), (2, side, side)]
    else:
        grids = [(1, 4, 6), (2, 2, 4)]
    rows = sum(torch.Size(grid).numel() for grid in grids)
    generator = torch.Generator().manual_seed(4)
    return MediaInput(
        loaded=torch.randn(rows, architecture.row_values, generator=generator),
        grids=torch.tensor(grids),
    )


def built(model: Any, name: str) -> Any:
    decoder = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    part = family_of(model).parts_of(model)[name]
    return load(part.build)(model.encoder(name), decoder=decoder, groups=groups, backend="local")


class Copied(TorchDispatchMode):
    """Counts copies of host tensors to the meta device, which stands for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("_to_copy", "to"):  # the latter in inference mode
            given = tree_leaves(args)[0]
            self.count += given.device.type == "cpu" and result.is_meta
        return result


def copies(_: int, *, case: str) -> list[int]:
    """Of three forwards; before them, an evaluation has met the sizes."""
    name, entry, _, _ = CASES[case]
    model = compose_model(model_name=name).config
    architecture = model.encoder(entry)
    with model_parallel():
        encoder = built(model, entry).to(META)
    media = media_of(architecture)
    media = replace(media, loaded=media.loaded.to(META))
    counts = []
    for evaluates in (True, False, False):
        with Copied() as copied, no_waits(), torch.inference_mode(evaluates):
            states, _ = encoder(media)
        if not evaluates:
            states.backward(torch.empty_like(states))
        counts.append(copied.count)
    return counts


@pytest.mark.parametrize("case", CASES)
def test_tables_are_copied_once(case):
    _, _, each, first = CASES[case]
    assert run_ranks(copies, 1, case=case) == [[each + first, each, each]]
