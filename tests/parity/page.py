"""The page of a part of the parity matrix, made of the results of its cells."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loongplug.verify.compare import GRADIENT_LIMIT, NORM_LIMIT
from parity.cells import AXES, Cell
from parity.placed import published

_FIGURES = ("gradients", "norm", "loss", "parameters")
_MOST_VALUES = 8  # of an axis, to have a line for each


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

    @property
    def figures(self) -> tuple[float, ...]:
        """The largest errors, as tables have them."""
        figures = (self.gradients, self.gradient_norm, self.loss, self.parameters)
        return tuple(0.0 if figure is None else figure for figure in figures)

    @property
    def verdict(self) -> str:
        """The word of a table's last column."""
        if self.failed is not None:
            return "**failed**"
        if self.bits:
            return f"**{self.bits}**"
        return "agrees" if self.agrees else "**differs**"

    @property
    def outcome(self) -> str:
        """The verdict, with an error's last line or the largest error."""
        if self.failed is not None:
            return f"failed: {self.failed.strip().splitlines()[-1]}"
        verdict = "agrees" if self.agrees else "differs"
        return f"{verdict} ({self.bits or f'{self.gradients:.1e}'})"


def page(title: str, results: Sequence[Result], *, about: str, whole: int, code: str) -> str:
    """The page of ``results``, of ``whole`` cells, made by code with that digest."""
    agree = sum(each.agrees for each in results)
    axes = [axis for axis in AXES if len(_values(results, axis)) > 1]
    lines = [
        f"# Parity matrix: {title}",
        "",
        "Made by `./scripts/parity_matrix.sh`. Each row is one layout of a small model on CPU "
        "ranks, held against a single rank on the same weights and samples for two steps "
        "(docs/verify.md).",
        "",
        about,
        "",
        f"{len(results)} of {whole} cells: {agree} agree, {len(results) - agree} do not. The code "
        f"had the digest `{code}`. The figures are the largest relative error of any gradient "
        f"(limit {GRADIENT_LIMIT:.0e}), of the gradient norm (limit {NORM_LIMIT:.0e}), of any "
        "microbatch's loss, and of any parameter.",
        "",
        *_by_value(results, axes),
    ]
    for model in _values(results, "model"):
        mine = [each for each in results if each.cell.model == model]
        lines += ["", f"## {model}", "", *_table(mine, [axis for axis in axes if axis != "model"])]
    return "\n".join([*lines, ""])


def _values(results: Sequence[Result], axis: str) -> list[object]:
    return list(dict.fromkeys(getattr(each.cell, axis) for each in results))


def _by_value(results: Sequence[Result], axes: Sequence[str]) -> Iterator[str]:
    """A line for each value of an axis, for each published layout, and for all cells."""
    yield _line(["", "", "cells", "agree", *(f"largest error: {name}" for name in _FIGURES)])
    yield _line(["---", "---", *["---:"] * 6])
    for axis in axes:
        if len(values := _values(results, axis)) <= _MOST_VALUES:
            for value in values:
                mine = [each for each in results if getattr(each.cell, axis) == value]
                yield _largest(axis, _shown(value), mine)
    of_tables: dict[str, list[Result]] = {}
    for each in results:
        of_tables.setdefault(published(each.cell), []).append(each)
    for name, mine in sorted(of_tables.items()):
        if name:
            yield _largest("published", name, mine)
    yield _largest("all", "", results)


def _largest(axis: str, value: str, results: Sequence[Result]) -> str:
    agree = sum(each.agrees for each in results)
    columns = zip(*(each.figures for each in results), strict=True)
    largest = [f"{max(column):.1e}" for column in columns]
    return _line([axis, value, str(len(results)), str(agree), *largest])


def _table(results: Sequence[Result], axes: Sequence[str]) -> Iterator[str]:
    yield _line([*axes, *_FIGURES, "verdict"])
    yield _line([*["---"] * len(axes), *["---:"] * len(_FIGURES), "---"])
    for each in sorted(results, key=lambda result: result.cell):
        figures = ("" if each.loss is None else f"{figure:.1e}" for figure in each.figures)
        yield _line([*(_shown(getattr(each.cell, axis)) for axis in axes), *figures, each.verdict])


def _shown(value: object) -> str:
    text = ("yes" if value else "") if isinstance(value, bool) else str(value)
    return text.replace("|", ", ")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
