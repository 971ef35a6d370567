"""Whole runs with experts' exchange overlapped: not a bit differs from those without."""

import hashlib
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from ranks import run_ranks
from torch import Tensor

from loongplug.data.microbatch import Microbatch
from loongplug.training.forward_step import LossReport
from loongplug.training.run import run

OVERLAP = "--overlap-moe-expert-parallel-comm"
EP2 = ("--expert-model-parallel-size", "2")


class Numbers:
    """Watches a run: every microbatch's loss, every step's norm, at its end the parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.chunks: Any = ()

    def built(self, chunks: Any, optimizer: Any, **_: Any) -> None:
        self.chunks = chunks

    def loss(self, microbatch: Microbatch, report: LossReport) -> None:
        self.losses.append(float(report[0]))

    def parameters(self) -> dict[str, str]:
        return {
            f"{number}.{name}": hashlib.sha256(bytes_of(parameter)).hexdigest()
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }


def bytes_of(parameter: Tensor) -> bytes:
    return parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def trained(rank: int, *, flags: list[str]) -> dict[str, Any]:
    numbers = Numbers()
    step = ChainedOptimizer.step

    def noted(self: Any) -> Any:
        result = step(self)
        numbers.norms.append(result[1])
        return result

    ChainedOptimizer.step = noted
    run(flags, watch=numbers)
    return {
        "losses": numbers.losses, "norms": numbers.norms, "parameters": numbers.parameters()
    }


@pytest.fixture(scope="module")
def flags(flags):
    return [
        *flags,
        *("--model-name", "qwen3_vl_moe_tiny", "--bf16", "--micro-batch-size", "1"),
        *("--train-iters", "3", "--use-distributed-optimizer"),
    ]


def test_overlap(flags):
    plain = run_ranks(trained, 2, flags=[*flags, *EP2], timeout=280.0)
    found = run_ranks(trained, 2, flags=[*flags, *EP2, OVERLAP], timeout=280.0)
    print(plain[0]["losses"], plain[0]["norms"])
    print(found[0]["losses"], found[0]["norms"])
    assert found == plain
