"""A save holds the encoder's real values, although its state is released soon after."""

import time
from typing import Any

import pytest
import torch
from full_state import Kept, read_state, run_and_keep_state
from ranks import run_ranks

from loongplug.platform.cpu import CpuPlatform

pytestmark = pytest.mark.slow

# Experts over two ranks, adapters in encoder and decoder, an encoder split over both stages.
LAYOUT = (
    *("--model-name", "qwen3_vl_moe_tiny", "--use-distributed-optimizer", "--sequence-parallel"),
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    *("--expert-model-parallel-size", "2", "--enable-full-hetero-dp"),
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


def test_saves_beside_an_encoder_that_leaves(run_flags, tmp_path):
    flags = [*run_flags, *LAYOUT, "--train-iters", "3"]

    def ran(name: str, *more: str, function: Any = run_and_keep_state) -> Any:
        given = {"flags": [*flags, *more], "folder": tmp_path / name, "timeout": 240.0}
        return run_ranks(function, 4, **given)

    plain = ran("plain")
    save = ("--save", str(tmp_path / "saved"))
    for kept, released in ran("offloaded", *OFFLOAD, *save, function=slow_saves):
        assert released > 20
        assert kept.losses == plain[0].losses
    # What was saved behind the first and the second step, each before more of them.
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step")
    for step in ("1", "2"):
        assert ran(step, *load, step)[0].losses == plain[0].losses[int(step) :]
    expected = read_state(tmp_path / "plain")
    for name in ("offloaded", "1", "2"):
        for kind, tensors in read_state(tmp_path / name).items():
            assert all(torch.equal(tensors[each], expected[kind][each]) for each in expected[kind])
