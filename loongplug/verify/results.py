"""What a cell of the parity matrix came to."""

from dataclasses import dataclass
from typing import Any

from loongplug.verify.cells import Cell
from loongplug.verify.saving_cells import SavingCell


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one cell came to: figures, or why there are none."""

    cell: Cell
    agrees: bool = False
    gradients: float | None = None
    gradient_norm: float | None = None
    loss: float | None = None
    parameters: float | None = None
    failed: str | None = None
    seconds: float = 0.0


def as_result(line: dict[str, Any]) -> Result:
    """A result of a line of JSON."""
    kind = SavingCell if "trained" in line["cell"] else Cell
    return Result(**line | {"cell": kind(**line["cell"])})


def outcome(result: Result) -> str:
    """One word or a figure more."""
    if result.failed is not None:
        return f"failed: {result.failed.strip().splitlines()[-1]}"
    return f"{'agrees' if result.agrees else 'differs'} ({result.gradients:.1e})"
