"""A comparison as text and as JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from typing import Any

from loongplug.verify.compare import (
    ALL_LIMITS,
    LIMITS,
    LOSS_LIMIT,
    NORM_LIMIT,
    Comparison,
    Measured,
    TensorError,
    known_error,
)
from loongplug.verify.plan import Plan

_DECODER = [f"text_decoder {part}" for part in ("embeddings", "layers", "experts", "head")]
_SHOWN = 5  # of what differs, of each kind


def report(plan: Plan, comparison: Comparison) -> str:
    """The table, what differs most, and the verdict in the last line."""
    lines = [f"{plan.model}: {plan.ranks} {plan.device} rank(s) against a single one"]
    lines += [f"  {note}" for note in plan.notes]
    lines += ["", *_table(comparison), "", *_single_lines(comparison), ""]
    lines += _differences(comparison)
    verdict = "differs. The layout computes another training step than a single rank."
    if comparison.agrees:
        verdict = "agrees. The layout computes the single rank's training step."
    return "\n".join([*lines, f"verdict: {verdict}"])


def _table(comparison: Comparison) -> Iterable[str]:
    rows = [("largest error", *LIMITS)]
    for module in modules_of(comparison):
        worst = (comparison.worst(what, module=module) for what in LIMITS)
        rows.append((module, *("" if each is None else _figure(each) for each in worst)))
    rows.append(("limit", *(f"{limit:.0e}" for limit in LIMITS.values())))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *padded]).rstrip()


def modules_of(comparison: Comparison) -> list[str]:
    """The rows of the table that this model has."""
    present = {each.module for each in comparison.tensors}
    return [*sorted(present - {*_DECODER}), *(part for part in _DECODER if part in present)]


def _figure(measured: Measured) -> str:
    return f"{measured.error:.1e}" + " !" * measured.fails


def _single_lines(comparison: Comparison) -> Iterable[str]:
    none = Measured(what="loss", step=None, error=0.0)  # of a run without steps
    loss: Measured = max(comparison.losses, key=known_error, default=none)
    norm: Measured = max(comparison.norms, key=known_error, default=none)
    microbatches = f"{len(comparison.losses)} microbatches, limit {LOSS_LIMIT:.0e}"
    yield f"loss per microbatch  {_figure(loss)}  ({microbatches})"
    steps = f"{len(comparison.norms)} steps, limit {NORM_LIMIT:.0e}"
    yield f"gradient norm        {_figure(norm)}  ({steps})"
    state = "bit-identical" if not comparison.apart else f"{len(comparison.apart)} differ !"
    yield f"copies between ranks {state}"


def _differences(comparison: Comparison) -> list[str]:
    lines = [f"! {fault}" for fault in comparison.faults]
    lines += _some([f"! {each}" for each in comparison.apart])
    for norm in comparison.norms:
        if norm.fails:
            times = norm.expected and norm.found == norm.found
            lines.append(
                f"! gradient norm of step {_number(norm)}: {norm.found:.6g}, expected "
                f"{norm.expected:.6g}" + (f" (x{norm.found / norm.expected:.3f})" if times else "")
            )
    lines += _some(
        [
            f"! loss of step {_number(each)}, microbatch from sample {each.first_sample}: "
            + (each.note or f"error {each.error:.1e}")
            for each in comparison.losses
            if each.fails
        ]
    )
    for what in LIMITS:
        failing = [each for each in comparison.tensors if each.what == what and each.fails]
        failing.sort(key=lambda each: (each.step or 0, -each.error))
        lines += _some([_tensor_line(each) for each in failing])
    return [*lines, ""] if lines else []


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"  and {more} more like these"]


def _number(measured: Measured) -> int | None:
    """The step as people count."""
    return None if measured.step is None else measured.step + 1


def _tensor_line(each: TensorError) -> str:
    when = "" if each.step is None else f" of step {_number(each)}"
    size = f"x{each.ratio:.3f} in size" if each.ratio == each.ratio else "no numbers"
    return f"! {each.what}{when}, {each.module}: {each.name}: error {each.error:.1e}, {size}"


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
    figures = {
        "model": plan.model,
        "ranks": plan.ranks,
        "device": plan.device,
        "agrees": comparison.agrees,
        "notes": list(plan.notes),
        "limits": ALL_LIMITS,
        "modules": modules,
        "loss": max(map(known_error, comparison.losses), default=0.0),
        "gradient_norm": max(map(known_error, comparison.norms), default=0.0),
        "microbatches": len(comparison.losses),
        "steps": len(comparison.norms),
        "copies_apart": list(comparison.apart),
        "faults": list(comparison.faults),
        "tensors": _failing(comparison.tensors),
        "losses": _failing(comparison.losses),
    }
    return _finite(figures)


def _failing(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    return [asdict(each) | {"step": _number(each)} for each in measured if each.fails]


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a finite number: null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
