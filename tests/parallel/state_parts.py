"""Modules that note which state they are in, in forward and backward."""

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import nn
from torch.nn.functional import gelu

from loongplug.parallel.states import PARALLEL_STATES


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, label: str, seen: list[tuple[str, str]]) -> torch.Tensor:
        ctx.label, ctx.seen = label, seen
        seen.append((f"{label} forward", PARALLEL_STATES.current))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.append((f"{ctx.label} backward", PARALLEL_STATES.current))
        return grads[0], None, None


class Part(nn.Module):
    """Something with weights that notes the state of every node that it can reach."""

    def __init__(self, label: str, seen: list[tuple[str, str]], *, dropout: float = 0.0) -> None:
        super().__init__()
        self.label, self.seen, self.dropout = label, seen, dropout
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: seen.append((f"{label} {name}", PARALLEL_STATES.current))
            )

    def probe(self, x: torch.Tensor, where: str) -> torch.Tensor:
        return Probe.apply(x, f"{self.label} {where}", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.probe(self.first(self.probe(x, "begin")), "middle")
        if self.dropout:
            with get_cuda_rng_tracker().fork():
                x = torch.dropout(x, self.dropout, True)
            x = torch.dropout(x, self.dropout, True)
        return self.probe(self.second(gelu(x)), "end")


def states_of(seen: list[tuple[str, str]], label: str) -> set[str]:
    states = {state for each, state in seen if each.startswith(label)}
    assert states, label
    return states


def make_parts(*labels: str) -> tuple[list[tuple[str, str]], list[Part]]:
    torch.manual_seed(0)
    seen: list[tuple[str, str]] = []
    return seen, [Part(label, seen) for label in labels]
