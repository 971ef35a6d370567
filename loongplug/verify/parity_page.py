"""``docs/parity.md``, made of the matrix's results."""

from collections.abc import Iterable, Sequence

from loongplug.verify.cells import MOST_RANKS
from loongplug.verify.compare import GRADIENT_LIMIT, NORM_LIMIT
from loongplug.verify.results import Result

_HEAD = (
    *("encoder TP", "TP", "PP", "VPP", "DP", "EP", "SP", "recompute", "tied", "optimizer"),
    *("gradients", "norm", "loss", "parameters", "verdict"),
)


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
        f"{MOST_RANKS} ranks is a cell, with one choice of the other columns; more cells follow "
        "until every value of a column has met every value of every other.",
    ]
    for model in dict.fromkeys(result.cell.model for result in results):
        mine = [result for result in results if result.cell.model == model]
        lines += ["", f"## {model}", "", *_summary(mine), *_table(mine)]
    return "\n".join(lines) + "\n"


def _summary(results: Sequence[Result]) -> Iterable[str]:
    ran = [each for each in results if each.gradients is not None]
    if ran:
        gradients = max(each.gradients or 0.0 for each in ran)
        norm = max(each.gradient_norm or 0.0 for each in ran)
        yield f"Largest error of any gradient {gradients:.1e}, of a gradient norm {norm:.1e}."
        yield ""


def _table(results: Sequence[Result]) -> Iterable[str]:
    yield _line(_HEAD)
    yield _line(["---:"] * 6 + ["---"] * 4 + ["---:"] * 4 + ["---"])
    for each in sorted(results, key=lambda result: result.cell):
        cell = each.cell
        yield _line(
            [
                *(str(n) for n in (cell.encoder_tp, cell.tp, cell.pp, cell.vpp, cell.dp, cell.ep)),
                "yes" if cell.sequence_parallel else "",
                cell.recompute,
                "yes" if cell.tied else "",
                cell.optimizer,
                *(
                    "" if value is None else f"{value:.1e}"
                    for value in (each.gradients, each.gradient_norm, each.loss, each.parameters)
                ),
                _verdict(each),
            ]
        )


def _verdict(result: Result) -> str:
    if result.failed is not None:
        return "**failed**"
    return "agrees" if result.agrees else "**differs**"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
