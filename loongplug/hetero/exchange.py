"""Features and their gradients between the ranks that encode and those that decode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from loongplug.hetero.placement import Placement
from loongplug.hetero.routes import Transfer, feature_transfers, gradient_transfers
from loongplug.observe.recorder import NOTHING, Recorder


@dataclass(frozen=True, kw_only=True)
class Units:
    """What every rank of a model replica knows of the units that travel together.

    ``tokens`` and ``owners`` by unit; a payload is [tokens, width] of ``dtype``.
    """

    tokens: tuple[int, ...]
    owners: tuple[int, ...]
    width: int
    dtype: torch.dtype


class Exchange:
    """Moves payloads within one model replica: exactly the rows that a rank needs, once.

    ``group`` has all ranks of the placement's groups and consumers. Every rank of it enters every
    call; one without rows takes part with none.
    """

    def __init__(
        self,
        placement: Placement,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        recorder: Recorder = NOTHING,
    ) -> None:
        self._placement = placement
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._device = device
        self._recorder = recorder

    def gather_variable_shape_embeddings(
        self, payloads: Mapping[int, Tensor], units: Units
    ) -> dict[int, Tensor]:
        """From the ranks that encoded to the consumers.

        Args:
            payloads: of each unit that this rank encoded, [tokens, width].

        Returns:
            every unit's payload on the consumers, nothing elsewhere.
        """
        return self._move(payloads, feature_transfers(self._placement, units.owners), units)

    def scatter_variable_shape_embeddings(
        self, gradients: Mapping[int, Tensor], units: Units
    ) -> dict[int, Tensor]:
        """From the consumers back to the ranks that encoded.

        Args:
            gradients: of every unit on the consumers, [tokens, width].

        Returns:
            the gradient of each unit that this rank encoded.
        """
        return self._move(gradients, gradient_transfers(self._placement, units.owners), units)

    def _move(
        self, held: Mapping[int, Tensor], transfers: Sequence[Transfer], units: Units
    ) -> dict[int, Tensor]:
        """One all-to-all: rows by the rank they go to, each rank's by unit."""
        mine = [each for each in transfers if each.source == self._rank]
        due = [each for each in transfers if each.target == self._rank]
        # What a rank has already stays where it is.
        kept = {each.unit: held[each.unit].detach() for each in due if each.source == self._rank}
        out = [
            held[each.unit].detach()
            for rank in self._ranks
            for each in mine
            if each.target == rank != self._rank
        ]
        sent = [self._rows(mine, units, target=rank) for rank in self._ranks]
        received = [self._rows(due, units, source=rank) for rank in self._ranks]
        empty = torch.empty(0, units.width, dtype=units.dtype, device=self._device)
        rows = torch.empty(sum(received), units.width, dtype=units.dtype, device=self._device)
        nbytes = sum(sent) * units.width * units.dtype.itemsize
        with self._recorder.span("exchange", "units", bytes=nbytes):
            dist.all_to_all_single(rows, torch.cat([empty, *out]), received, sent, self._group)
        arrived = [
            each.unit for rank in self._ranks for each in due if each.source == rank != self._rank
        ]
        parts = rows.split([units.tokens[unit] for unit in arrived]) if arrived else ()
        return kept | dict(zip(arrived, parts, strict=True))

    def _rows(
        self,
        transfers: Sequence[Transfer],
        units: Units,
        *,
        source: int | None = None,
        target: int | None = None,
    ) -> int:
        """Rows between this rank and another one; none to itself."""
        other = source if target is None else target
        if other == self._rank:
            return 0
        return sum(
            units.tokens[each.unit]
            for each in transfers
            if (each.source if target is None else each.target) == other
        )
