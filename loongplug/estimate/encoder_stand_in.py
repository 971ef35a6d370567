"""An encoder's stage without its layers: what its passes make, and what they hold meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loongplug.data.positions import Grid
from loongplug.estimate.tape import ENCODER, Tape
from loongplug.estimate.trace import PassBytes
from loongplug.models.encoder_stages import EncoderInput, HandedOn

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class EncoderStandIn:
    """In the place of an encoder's passes, with as many bytes on a tape.

    ``blank`` are those of the smallest unit, which stands in for no media, ``largest`` those of
    the largest; what lies between grows with the rows. Of each medium a pass makes as many rows as
    ``made`` says of its grid, [rows, width] of ``dtype``, which count for ``region``.
    """

    blank: PassBytes
    largest: PassBytes
    made: Callable[[Grid], int]
    width: int
    dtype: torch.dtype
    region: str

    def payload(self, given: EncoderInput | None, tape: Tape) -> Tensor:
        """What a pass makes; its graph holds what the encoder's would."""
        taken, rows, made = None, 0, 0
        if given is not None:
            taken = given.states if isinstance(given, HandedOn) else given.rows
            rows = int(given.grids.prod(dim=-1).sum())
            made = sum(self.made((time, high, wide)) for time, high, wide in given.grids.tolist())
        start = torch.empty(0, requires_grad=True)
        found: Tensor = _Pass.apply(start, taken, self._bytes(rows), self, made, tape)
        return found

    def _bytes(self, rows: int) -> PassBytes:
        """Of a pass with so many rows of input; of 0, with what it keeps of its own."""
        low, high = self.blank, self.largest
        part = (max(rows, low.rows) - low.rows) / max(1, high.rows - low.rows)

        def at(low: int, high: int) -> int:
            return round(low + (high - low) * part)

        own = 0 if rows else low.given
        return PassBytes(
            kept=at(low.kept, high.kept) + own,
            forward=at(low.forward, high.forward) + own,
            backward=at(low.backward, high.backward),
            given=high.given,
        )


class _Pass(torch.autograd.Function):
    """Holds bytes, and makes as many for a moment, where an encoder would compute."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        taken: Tensor | None,
        cost: PassBytes,
        encoder: EncoderStandIn,
        rows: int,
        tape: Tape,
    ) -> Tensor:
        """``taken`` [rows, width] are media, or what the stage before has made; None without."""
        with tape.region(ENCODER):
            kept = torch.empty(cost.kept, dtype=torch.uint8, device=_META)
        tape.work(cost.forward - cost.kept)
        ctx.save_for_backward(kept, taken if cost.given else None)
        ctx.work = cost.backward, tape
        ctx.given = None if taken is None else (taken.shape, taken.dtype)
        with tape.region(encoder.region):
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
        return None, came, None, None, None, None
