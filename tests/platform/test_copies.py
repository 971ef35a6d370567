"""Which GPU a run's copies are made on; no GPU is needed to tell."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from loongplug.platform.platforms import CudaPlatform
from loongplug.training.provider import tensor_offload_of

pytestmark = pytest.mark.quick


def test_the_copies_of_a_rank_are_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for before Megatron says which that is: until then it is GPU 0 on all."""
    gpu = 0
    made: list[int] = []

    class Stream:
        def __init__(self) -> None:
            made.append(gpu)

        def wait_stream(self, other: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    args = Namespace(offload_tensors=["qkv"], min_offloaded_tensor_size=1)
    platform = CudaPlatform()
    offload = tensor_offload_of(args, platform=platform)
    platform.deactivate()  # its replacements are not the other tests'
    assert offload is not None
    assert made == []
    gpu = 5
    for _ in range(2):
        offload._queue.leave({})
    assert made == [5]
