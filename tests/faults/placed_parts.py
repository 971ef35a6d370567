"""What drawn placements are played with: process groups, tokens' numbers, chunks of a weight."""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from math import prod
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from drawn_placements import DrawnPlacement
from megatron.core.enums import ModelType
from numpy.typing import NDArray
from torch import Tensor, nn

from loongplug.models.encoder import EncoderInput, HandedOn
from loongplug.models.entries import Entry

WIDTH, LENGTH = 2, 12
_COUNTS = {"some": (0, 0, 1, 3, LENGTH), "many": (5, LENGTH), "uneven": (0, LENGTH), "none": (0,)}
_MOST_GROUPS = 60  # that are kept for later draws: each has sockets and threads


class Groups:
    """Process groups by their ranks; all ranks of the world ask for the same ones in one order."""

    def __init__(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def of(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Made now or before; None on other ranks."""
        key = name, tuple(ranks)
        if key not in self._made:
            self._made[key] = dist.new_group(list(ranks), timeout=self._timeout)
        return self._made[key] if dist.get_rank() in ranks else None

    def tidy(self) -> None:
        """Between two draws: let go of all, where there are many."""
        if len(self._made) > _MOST_GROUPS:
            dist.barrier()
            for (_, ranks), group in self._made.items():
                if dist.get_rank() in ranks:
                    dist.destroy_process_group(group)
            self._made.clear()


def places(draw: DrawnPlacement, name: str, replica: int, number: int) -> list[NDArray[np.int64]]:
    """Of each sample of a decoder replica's microbatch, where its tokens of an encoder lie."""
    chance = Random(f"{draw.seed} {name} {replica} {number}")
    lone = draw.media == "lone"
    counts = (0,) if lone else _COUNTS[draw.media]
    found = [
        sorted(chance.sample(range(LENGTH), chance.choice(counts))) for _ in range(draw.micro_batch)
    ]
    if lone and (replica, number) == (draw.dp - 1, draw.microbatches // 2):
        found[-1] = [1, 2, LENGTH - 1]
    return [np.array(each, dtype=np.int64) for each in found]


def features_of(name: str, step: int, replica: int, number: int, sample: int, count: int) -> Tensor:
    """The numbers of a sample's tokens, [count]: what an encoder gets, and what it makes of it."""
    chance = Random(f"{name} {step} {replica} {number} {sample}")
    return torch.tensor([float(chance.randrange(1, 509)) for _ in range(count)])


def gradients_of(features: Tensor) -> Tensor:
    """What goes back of tokens, [count]: another number of each."""
    return features.remainder(13) + 1


# What an executor asks of an encoder with stages: a state is of a token, and as wide as a feature.
_ENCODER = SimpleNamespace(architecture=SimpleNamespace(hidden_size=WIDTH, states=prod))


class Chunk(nn.Module):
    """A chunk of the decoder; or, on an encoder's rank, that encoder or a stage of it.

    ``first``: of the decoder, or of the encoder's stages.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self, config: Any, entries: Sequence[Entry], *, first: bool = False, trains: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=trains)
        self.config = config
        self.encoders = tuple(entries)
        self.text_decoder = SimpleNamespace(config=self.config)
        self.outside_schedule: set[str] = set()
        self.parts = {entry.name: SimpleNamespace(no_sync=nullcontext) for entry in self.encoders}
        self.feature_sources: dict[str, Any] = {}
        self.first = first
        self.came = 0  # gradients of units, at an encoder
        self._given: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self._given,) = tensors

    def trains(self, entry: Entry) -> bool:
        return self.weight.requires_grad

    def modules_of(self, entry: Entry) -> dict[str, Any]:
        return {entry.name: _ENCODER}

    def payload(self, entry: Entry, given: EncoderInput | None) -> Tensor:
        rows = self._rows(given)
        made = rows * self.weight
        if made.requires_grad:
            made.register_hook(lambda gradient: self._gradient_came(gradient, rows.detach()))
        return made

    def _rows(self, given: EncoderInput | None) -> Tensor:
        if given is None:  # as a model has it, the states of a blank unit need a gradient
            return torch.zeros(0, WIDTH, requires_grad=not self.first)
        return given.states if isinstance(given, HandedOn) else given.rows

    def _gradient_came(self, gradient: Tensor, rows: Tensor) -> None:
        assert torch.equal(gradient, gradients_of(rows)), "a gradient is another unit's"
        self.came += 1

    def behind(self) -> Tensor:
        """The state that the chunk before has made, with the weight of this one."""
        assert self._given is not None
        return self._given * self.weight
