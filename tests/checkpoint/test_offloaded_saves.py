"""A save holds the encoder's real values, although its state is released soon after."""

import time
from typing import Any

import pytest
import torch
from full_state import Kept, read_state, run_and_keep_state
from ranks import run_ranks

from loongplug.platform.platforms import CpuPlatform

pytestmark = pytest.mark.slow

# Experts over two ranks, adapters in encoder and decoder, an encoder split over both stages.
LAYOUT = (
    *("--model-name", "qwen3_vl_moe_tiny", "--use-distributed-optimizer", "--sequence-parallel"),
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
    "--enable-full-hetero-dp",
    "model.image_encoder.tensor_model_parallel_size=4",
    *("+model.image_encoder.lora.rank=2", "+model.foundation.lora.rank=2"),
)
OFFLOAD = ("--offload-encoder-state", "--async-save", "--save-interval", "1")


def slow_saves(rank: int, **kwargs: Any) -> tuple[Kept, int]:
    """A run whose checkpoints are written while it goes on; and how often storages were let go."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original, release = FileSystemWriterAsync.write_preloaded_data, CpuPlatform.release
    released = []

    def write(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return original(*args, **options)

    def noted(self: CpuPlatform, storage: Any) -> None:
        released.append(storage.nbytes())
        release(self, storage)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    CpuPlatform.release = noted
    return run_and_keep_state(rank, **kwargs), len(released)


def test_what_is_saved_is_what_the_run_went_on_with(run_flags, tmp_path):
    given = {"timeout": 240.0, "flags": [*run_flags, *LAYOUT, "--train-iters", "3"]}
    saved, resumed = tmp_path / "saved", tmp_path / "resumed"
    save = [*given["flags"], *OFFLOAD, "--save", str(saved)]
    offloaded = run_ranks(slow_saves, 4, **given | {"flags": save}, folder=saved)
    assert all(released > 20 for _, released in offloaded)
    load = [*given["flags"], "--load", str(saved), "--ckpt-step", "1"]
    found = run_ranks(run_and_keep_state, 4, **given | {"flags": load}, folder=resumed)
    assert all(kept.losses == offloaded[0][0].losses[1:] for kept in found)
    expected = read_state(saved)
    for kind, tensors in read_state(resumed).items():
        assert all(torch.equal(tensors[each], expected[kind][each]) for each in expected[kind])
