"""Pipeline stages of an encoder on ranks of its own: who has which layers, and what goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from loongplug.data.microbatch import MediaInput
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.encoder import blank_unit


@dataclass(frozen=True, kw_only=True)
class EncoderStage:
    """One of an encoder's pipeline stages; ``sizes`` are the layers that each of them has."""

    sizes: tuple[int, ...]
    number: int = 0

    @property
    def first(self) -> bool:
        """Whether it is given media, and has what stands before the layers."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it has what stands behind the layers, and the projector."""
        return self.number == len(self.sizes) - 1

    @property
    def layers(self) -> range:
        """Its own, counted from 0 over the whole encoder."""
        start = sum(self.sizes[: self.number])
        return range(start, start + self.sizes[self.number])


@dataclass(frozen=True, kw_only=True)
class HandedOn:
    """What a stage that is not the first is given of a unit, in the place of its media.

    ``grids`` are those of the media, [media, 3] int64 on the host. ``states`` are those that the
    stage before has made, [states, hidden], and ``taps`` the ones behind each tapped layer so far,
    [states, hidden] each.
    """

    grids: Tensor
    states: Tensor
    taps: tuple[Tensor, ...] = ()

    @classmethod
    def unpacked(cls, payload: Tensor, *, grids: Tensor, hidden: int) -> "HandedOn":
        """Of what :func:`packed` made."""
        states, *taps = payload.split(hidden, dim=1)
        return cls(grids=grids, states=states, taps=tuple(taps))


EncoderInput = MediaInput | HandedOn


def packed(states: Tensor, taps: Sequence[Tensor]) -> Tensor:
    """All of a state side by side, as it travels, [states, (1 + taps) * hidden]."""
    return torch.cat([states, *taps], dim=1) if taps else states


def payload_widths(architecture: EncoderArchitecture) -> tuple[int, ...]:
    """Of what each stage but the last hands on."""
    *boundaries, _ = accumulate(architecture.layers_of_stages)
    taps = [sum(layer < behind for layer in architecture.taps()) for behind in boundaries]
    return tuple((1 + each) * architecture.hidden_size for each in taps)


class StagedEncoder[A: EncoderArchitecture](MegatronModule):
    """A stage of an encoder over packed media, whose transformer layers are Megatron's.

    These are sharded over the tensor parallel group of ``pg_collection``; all else is replicated.
    Every rank of that group enters every forward. Megatron's attention cannot shape zero tokens: an
    empty unit is computed as :meth:`blank_unit`, of which the caller keeps nothing. Beside the
    decoder an encoder has one stage, whatever the decoder has.
    """

    def __init__(
        self, config: TransformerConfig, architecture: A, *, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        sizes = architecture.layers_of_stages
        number = pg_collection.pp.rank() if len(sizes) > 1 else 0
        self.stage = EncoderStage(sizes=sizes, number=number)

    def blank_unit(self) -> EncoderInput:
        """What an empty unit is computed as: the smallest medium there is, all zero.

        A later stage is given its states. They need a gradient: layers that are frozen here are
        gone through backward all the same where something before them trains.
        """
        architecture, like = self.architecture, next(self.parameters())
        if self.stage.first:
            return blank_unit(architecture, device=like.device)
        grid, hidden = architecture.blank_grid(), architecture.hidden_size
        size = architecture.states(grid), payload_widths(architecture)[self.stage.number - 1]
        payload = torch.zeros(size, dtype=like.dtype, device=like.device, requires_grad=True)
        return HandedOn.unpacked(payload, grids=torch.tensor([grid]), hidden=hidden)
