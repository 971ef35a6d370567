"""``docs/parity.md``, made of the matrix's results."""

from collections.abc import Iterable, Sequence

from loongplug.verify.cells import MODES, MOST_RANKS
from loongplug.verify.compare import GRADIENT_LIMIT, NORM_LIMIT
from loongplug.verify.published import TABLE_A8, PublishedLayout
from loongplug.verify.results import Result

_FIGURES = ("gradients", "norm", "loss", "parameters")
_HEAD = (
    *("mode", "encoder TP", "TP", "PP", "VPP", "DP", "EP"),
    *("SP", "recompute", "tied", "optimizer", "balance", *_FIGURES, "verdict"),
)
_ALIGNED = ["---", *["---:"] * 6, *["---"] * 5, *["---:"] * 4, "---"]


def page(results: Sequence[Result], *, whole: int, code: str) -> str:
    """The page for ``results`` of some ``code``, of a matrix of ``whole`` cells."""
    agree = sum(result.agrees for result in results)
    lines = [
        "# Parity matrix",
        "",
        "Made by `./scripts/parity_matrix.sh`; do not edit. Each row is one layout of a small "
        "model on CPU ranks, held against a single rank on the same weights and samples for two "
        "steps, as [verify.md](verify.md) describes.",
        "",
        f"{len(results)} of {whole} cells: {agree} agree, {len(results) - agree} do not. The code "
        f"had the digest `{code}`.",
        "",
        f"The figures are the largest relative error of any gradient (limit {GRADIENT_LIMIT:.0e}), "
        f"of the gradient norm (limit {NORM_LIMIT:.0e}), of any microbatch's loss, and of any "
        "parameter.",
        "",
        f"Every layout of encoder TP x TP x PP x VPP x DP x EP over 1, 2 and 4 that fits "
        f"{MOST_RANKS} ranks is a cell in every mode that is another one there (heterogeneous DP "
        "takes a TP above the encoder's), with one choice of the other columns; every value of a "
        "column meets every value of every other that it can be with. Heterogeneous TP is the "
        "uniform mode with an encoder TP below TP. An encoder TP above TP is of several stages.",
        "",
        *_by_mode(results),
        "",
        *_published(results),
    ]
    for model in dict.fromkeys(result.cell.model for result in results):
        mine = [result for result in results if result.cell.model == model]
        lines += ["", f"## {model}", "", *_table(mine)]
    return "\n".join(lines) + "\n"


def _by_mode(results: Sequence[Result]) -> Iterable[str]:
    """A line for each mode, and for what is worth a look of its own."""
    groups = {mode: [each for each in results if each.cell.mode == mode] for mode in MODES}
    groups |= {
        "uniform, encoder TP below TP": [
            each for each in groups[MODES[0]] if each.cell.heterogeneous
        ],
        "full-hetero-dp with balance": [each for each in results if each.cell.balance],
        "all": list(results),
    }
    yield _line(["mode", "cells", "agree", *(f"largest error: {name}" for name in _FIGURES)])
    yield _line(["---", *["---:"] * 6])
    for name, mine in groups.items():
        agree = sum(each.agrees for each in mine)
        columns = zip(*map(_figures, mine), strict=True)
        largest = [f"{max(column):.1e}" for column in columns] or [""] * len(_FIGURES)
        yield _line([name, str(len(mine)), str(agree), *largest])


def _published(results: Sequence[Result]) -> Iterable[str]:
    yield "## Published layouts"
    yield ""
    yield (
        "The layouts of table A8 of *Heterogeneous Parallelism for Multimodal Large Language Model "
        f"Training* (Karnati et al.), colocated as in its section C.4: both modules on the same "
        f"{MOST_RANKS} ranks, DP doubled. They are run in full separation. The paper freezes the "
        "encoder; here it is trained."
    )
    yield ""
    yield _line(["layout", "decoder TP/PP/DP", "encoder TP/PP/DP", "cells", "verdict"])
    yield _line(["---"] * 3 + ["---:", "---"])
    for layout in TABLE_A8:
        yield _line(_published_row(layout, results))


def _published_row(layout: PublishedLayout, results: Sequence[Result]) -> list[str]:
    mine = [each for each in results if layout.is_run_by(each.cell)]
    verdicts = dict.fromkeys(_verdict(each) for each in mine)
    return [
        f"`{layout.name}`",
        f"{layout.tp} / {layout.pp} / {layout.dp}",
        f"{layout.encoder_tp} / 1 / {layout.encoder_dp}",
        str(len(mine)),
        ", ".join(verdicts) or "not run",
    ]


def _table(results: Sequence[Result]) -> Iterable[str]:
    yield _line(_HEAD)
    yield _line(_ALIGNED)
    order = {mode: place for place, mode in enumerate(MODES)}
    for each in sorted(results, key=lambda result: (order[result.cell.mode], result.cell)):
        cell = each.cell
        yield _line(
            [
                cell.mode,
                *(str(n) for n in (cell.encoder_tp, cell.tp, cell.pp, cell.vpp, cell.dp, cell.ep)),
                "yes" if cell.sequence_parallel else "",
                cell.recompute,
                "yes" if cell.tied else "",
                cell.optimizer,
                "yes" if cell.balance else "",
                *("" if each.loss is None else f"{figure:.1e}" for figure in _figures(each)),
                _verdict(each),
            ]
        )


def _figures(result: Result) -> tuple[float, ...]:
    figures = (result.gradients, result.gradient_norm, result.loss, result.parameters)
    return tuple(0.0 if figure is None else figure for figure in figures)


def _verdict(result: Result) -> str:
    if result.failed is not None:
        return "**failed**"
    return "agrees" if result.agrees else "**differs**"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
