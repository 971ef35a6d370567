"""What a cell of the parity matrix came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parity.cells import Cell
from parity.context_cells import ContextCell, OverlappedContextCell, StreamedContextCell
from parity.overlap_cells import OverlapCell
from parity.placement_cells import PlacementCell
from parity.saving_cells import SavingCell
from parity.streamed_cells import StreamedCell


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one cell came to: figures, or why there are none.

    ``bits`` says where a run that may not differ in a bit from another one does, in words.
    """

    cell: Cell
    agrees: bool = False
    gradients: float | None = None
    gradient_norm: float | None = None
    loss: float | None = None
    parameters: float | None = None
    bits: str = ""
    failed: str | None = None
    seconds: float = 0.0


def as_result(line: dict[str, Any]) -> Result:
    """A result of a line of JSON."""
    return Result(**line | {"cell": _kind(line["cell"])(**line["cell"])})


def _kind(cell: Mapping[str, Any]) -> type[Cell]:
    """By a field that the others don't have."""
    if "cp" in cell:
        more = {"schedule": StreamedContextCell, "delayed": OverlappedContextCell}
        return next((kind for field, kind in more.items() if field in cell), ContextCell)
    if "delayed" in cell:
        return OverlapCell
    if "own" in cell:
        return PlacementCell
    if "schedule" in cell:
        return StreamedCell
    return SavingCell if "away" in cell else Cell


def outcome(result: Result) -> str:
    """One word or a figure more."""
    if result.failed is not None:
        return f"failed: {result.failed.strip().splitlines()[-1]}"
    verdict = "agrees" if result.agrees else "differs"
    return f"{verdict} ({result.bits or f'{result.gradients:.1e}'})"
