"""A comparison as text and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from loongplug.verify.compare import (
    LIMITS,
    LOSS_LIMIT,
    NORM_LIMIT,
    Comparison,
    LossError,
    NormError,
    TensorError,
)
from loongplug.verify.plan import Plan

DECODER = (
    "text_decoder embeddings",
    "text_decoder layers",
    "text_decoder experts",
    "text_decoder head",
)
_SHOWN = 5  # of what differs, of each kind


def report(plan: Plan, comparison: Comparison) -> str:
    """The table, what differs most, and the verdict in the last line."""
    lines = [f"{plan.model}: {plan.ranks} {plan.device} rank(s) against a single one"]
    lines += [f"  {note}" for note in plan.notes]
    lines += ["", *_table(comparison), "", *_single_lines(comparison), ""]
    lines += _differences(comparison)
    return "\n".join([*lines, verdict(comparison)])


def verdict(comparison: Comparison) -> str:
    """The last line: whether the layout agrees."""
    if comparison.agrees:
        return "verdict: agrees. The layout computes the single rank's training step."
    return "verdict: differs. The layout computes another training step than a single rank."


def _table(comparison: Comparison) -> Iterable[str]:
    rows = [("largest error", *LIMITS)]
    for module in modules_of(comparison):
        cells = []
        for what, limit in LIMITS.items():
            worst = comparison.worst(what, module=module)
            cells.append("" if worst is None else _figure(worst.error, limit))
        rows.append((module, *cells))
    rows.append(("limit", *(f"{limit:.0e}" for limit in LIMITS.values())))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *padded]).rstrip()


def modules_of(comparison: Comparison) -> list[str]:
    """The rows of the table that this model has."""
    present = {each.module for each in comparison.tensors}
    return [*sorted(present - set(DECODER)), *(part for part in DECODER if part in present)]


def _figure(error: float, limit: float) -> str:
    return f"{error:.1e}" + ("" if error <= limit else " !")


def _single_lines(comparison: Comparison) -> Iterable[str]:
    loss = _worst(comparison.losses)
    norm = _worst(comparison.norms)
    microbatches = f"{len(comparison.losses)} microbatches, limit {LOSS_LIMIT:.0e}"
    yield f"loss per microbatch  {_figure(loss, LOSS_LIMIT)}  ({microbatches})"
    steps = f"{len(comparison.norms)} steps, limit {NORM_LIMIT:.0e}"
    yield f"gradient norm        {_figure(norm, NORM_LIMIT)}  ({steps})"
    state = "bit-identical" if not comparison.apart else f"{len(comparison.apart)} differ !"
    yield f"copies between ranks {state}"


def _worst(errors: Sequence[LossError] | Sequence[NormError]) -> float:
    values = [each.error for each in errors]
    return float("nan") if any(v != v for v in values) else max(values, default=0.0)


def _differences(comparison: Comparison) -> list[str]:
    lines = [f"! {fault}" for fault in comparison.faults]
    lines += _some([f"! {each}" for each in comparison.apart])
    for norm in comparison.norms:
        if norm.fails:
            lines.append(
                f"! gradient norm of step {norm.step + 1}: {norm.found:.6g}, expected "
                f"{norm.expected:.6g}{factor(norm.found, norm.expected)}"
            )
    lines += _some([_loss_line(each) for each in comparison.losses if each.fails])
    for what in LIMITS:
        failing = [each for each in comparison.tensors if each.what == what and each.fails]
        failing.sort(key=lambda each: (each.step or 0, -each.error))
        lines += _some([_tensor_line(each) for each in failing])
    return [*lines, ""] if lines else []


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"  and {more} more like these"]


def _loss_line(loss: LossError) -> str:
    where = f"! loss of step {loss.step + 1}, microbatch from sample {loss.first_sample}"
    return f"{where}: {loss.note or f'error {loss.error:.1e}'}"


def _tensor_line(each: TensorError) -> str:
    when = "" if each.step is None else f" of step {each.step + 1}"
    size = f"x{each.ratio:.3f} in size" if each.ratio == each.ratio else "no numbers"
    return f"! {each.what}{when}, {each.module}: {each.name}: error {each.error:.1e}, {size}"


def factor(found: float, expected: float) -> str:
    """How many times too large, where that can be said."""
    return f" (x{found / expected:.3f})" if expected and found == found else ""


def as_json(plan: Plan, comparison: Comparison) -> dict[str, Any]:
    """All figures of the report, and what differs."""
    modules = {
        module: {
            what: worst.error
            for what in LIMITS
            if (worst := comparison.worst(what, module=module)) is not None
        }
        for module in modules_of(comparison)
    }
    return {
        "model": plan.model,
        "ranks": plan.ranks,
        "device": plan.device,
        "agrees": comparison.agrees,
        "notes": list(plan.notes),
        "limits": LIMITS | {"loss": LOSS_LIMIT, "gradient_norm": NORM_LIMIT},
        "modules": modules,
        "loss": _worst(comparison.losses),
        "gradient_norm": _worst(comparison.norms),
        "microbatches": len(comparison.losses),
        "steps": len(comparison.norms),
        "copies_apart": list(comparison.apart),
        "faults": list(comparison.faults),
        "tensors": [
            asdict(each) | {"step": None if each.step is None else each.step + 1}
            for each in comparison.tensors
            if each.fails
        ],
        "losses": [
            asdict(each) | {"step": each.step + 1} for each in comparison.losses if each.fails
        ],
    }


def without_infinities(value: Any) -> Any:
    """JSON has no word for what is not a finite number: null."""
    if isinstance(value, dict):
        return {key: without_infinities(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_infinities(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
