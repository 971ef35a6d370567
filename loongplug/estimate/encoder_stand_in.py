"""An encoder's stage without its layers: what its passes make, and what they hold meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loongplug.data.positions import Grid
from loongplug.estimate.tape import ENCODER, Tape
from loongplug.estimate.trace import UnitBytes
from loongplug.models.encoder_stages import EncoderInput, HandedOn

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What units of any size cost: what lies between two traced ones grows with the rows.

    ``blank`` is the cost of the smallest, of so many ``blank_rows``, which stands in for no media;
    its own input has ``blank_input`` bytes.
    """

    blank: UnitBytes
    blank_rows: int
    blank_input: int
    largest: UnitBytes
    largest_rows: int

    def of(self, rows: int) -> UnitBytes:
        """Of a pass with so many rows of input; of 0, with what it keeps of its own."""
        more = max(rows, self.blank_rows) - self.blank_rows
        part = more / max(1, self.largest_rows - self.blank_rows)

        def at(low: int, high: int) -> int:
            return round(low + (high - low) * part)

        low, high = self.blank, self.largest
        own = self.blank_input if not rows and low.keeps_input else 0
        return UnitBytes(
            kept=at(low.kept, high.kept) + own,
            forward=at(low.forward, high.forward) + own,
            backward=at(low.backward, high.backward),
            keeps_input=high.keeps_input,
        )


@dataclass(frozen=True, kw_only=True)
class EncoderStandIn:
    """In the place of an encoder's passes, with as many bytes on a ``tape``.

    Of each medium it makes as many rows as ``made`` says of its grid, [rows, width] of ``dtype``,
    which count for ``region``.
    """

    costs: UnitCosts
    made: Callable[[Grid], int]
    width: int
    dtype: torch.dtype
    region: str
    tape: Tape

    def payload(self, given: EncoderInput | None) -> Tensor:
        """What a pass makes; its graph holds what the encoder's would."""
        taken, rows = None, 0
        if given is not None:
            taken = given.states if isinstance(given, HandedOn) else given.rows
            rows = sum(self.made((time, high, wide)) for time, high, wide in given.grids.tolist())
        cost = self.costs.of(0 if given is None else int(given.grids.prod(dim=-1).sum()))
        start = torch.empty(0, requires_grad=True)
        found: Tensor = _Pass.apply(start, taken, cost, self, rows)
        return found


class _Pass(torch.autograd.Function):
    """Holds bytes, and makes as many for a moment, where an encoder would compute."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        taken: Tensor | None,
        cost: UnitBytes,
        encoder: EncoderStandIn,
        rows: int,
    ) -> Tensor:
        """``taken`` [rows, width] are media, or what the stage before has made; None without."""
        with encoder.tape.region(ENCODER):
            kept = torch.empty(cost.kept, dtype=torch.uint8, device=_META)
        encoder.tape.work(cost.forward - cost.kept)
        ctx.save_for_backward(kept, taken if cost.keeps_input else None)
        ctx.work = cost.backward, encoder.tape
        ctx.given = None if taken is None else (taken.shape, taken.dtype)
        with encoder.tape.region(encoder.region):
            return torch.empty(rows, encoder.width, dtype=encoder.dtype, device=_META)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient of what was taken, where it needs one; of no media there is none."""
        held, (nbytes, tape) = ctx.saved_tensors, ctx.work
        tape.work(nbytes)
        came = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.given
            came = torch.empty(shape, dtype=dtype, device=_META)
        del held
        return None, came, None, None, None
