"""The matrix's pages in ``docs``, made of its results."""

from collections.abc import Iterable, Mapping, Sequence

from loongplug.verify.compare import GRADIENT_LIMIT, NORM_LIMIT
from parity.cells import FULL, HEARING_MODELS, MODES, MORE_MODELS, MOST_RANKS, Cell
from parity.context_cells import (
    COMM_TYPES,
    CONTEXT_MODES,
    CPS,
    ROWS,
    ContextCell,
    OverlappedContextCell,
    StreamedContextCell,
)
from parity.overlap_cells import KEPT, OverlapCell
from parity.published import TABLE_A8, PublishedLayout
from parity.results import Result
from parity.saving_cells import AWAY, TRAINED, SavingCell
from parity.streamed_cells import StreamedCell

FIGURES = ("gradients", "norm", "loss", "parameters")
_STREAMED_CONTEXT = f"{FULL}, streamed"
# Columns, and of a cell what they show.
_LAYOUT = {"mode": "mode", "encoder TP": "encoder_tp", "TP": "tp", "PP": "pp", "VPP": "vpp"}
_LAYOUT |= {"DP": "dp", "EP": "ep"}
_OPTIONS = {"SP": "sequence_parallel", "recompute": "recompute", "tied": "tied"}
_OPTIONS |= {"optimizer": "optimizer", "balance": "balance"}
_PARTS = {"CP": "cp", "rows": "rows", "keys come by": "comm", "trains": "trained"}
_PARTS |= {"away in phase 2": "away", "own ranks": "own"}
_KEPT = {"kept": "kept", "delayed": "delayed"}
_BITS = {"bits": ""}  # the result's own
_MORE: dict[type[Cell], dict[str, str]] = {
    Cell: {},
    SavingCell: {"trains": "trained", "away in phase 2": "away"},
    OverlapCell: {"trains": "trained", **_KEPT, "shared experts": "shared_experts", **_BITS},
    ContextCell: _PARTS,
    StreamedContextCell: _PARTS,
    OverlappedContextCell: {**_PARTS, **_KEPT, **_BITS},
    StreamedCell: {"trains": "trained", "away": "away"},
}


def layouts_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page of every layout, of ``whole`` cells; the results are those of some ``code``."""
    groups = _modes(results)
    groups["uniform, encoder TP below TP"] = [
        each for each in groups[MODES[0]] if each.cell.heterogeneous
    ]
    groups["full-hetero-dp with balance"] = [each for each in results if each.cell.balance]
    lines = [
        *page_head("Parity matrix", results, whole=whole, code=code),
        f"Every layout of encoder TP x TP x PP x VPP x DP x EP over 1, 2 and 4 that fits "
        f"{MOST_RANKS} ranks is a cell in every mode that is another one there (heterogeneous DP "
        "takes a TP above the encoder's), with one choice of the other columns; every value of a "
        "column meets every value of every other that it can be with. Heterogeneous TP is the "
        "uniform mode with an encoder TP below TP. An encoder TP above TP is of several stages. "
        f"{', '.join(MORE_MODELS)} have few cells: every value of a column is in every mode that "
        "it can be in.",
        "",
        *by_group("mode", groups | {"all": list(results)}),
        "",
        *_published(results),
        *_models(results),
    ]
    return "\n".join(lines) + "\n"


def hearing_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page of models that hear, of which one has two encoders."""
    lines = [
        *page_head("Parity of models that hear", results, whole=whole, code=code),
        f"{' and '.join(HEARING_MODELS)} train on rows with sounds; the second one has an "
        "encoder of images as well, in the same mode as that of sounds, and its rows have images "
        "too. Every value of a column is in every mode that it can be in.",
        "",
        *by_group("mode", _modes(results) | {"all": list(results)}),
        "",
        *_models(results),
    ]
    return "\n".join(lines) + "\n"


def savings_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page of cells in which something is frozen, adapted or away."""
    trained, away = _by(results, "trained", TRAINED), _by(results, "away", AWAY)
    lines = [
        *page_head("Parity of freeze, LoRA and offload", results, whole=whole, code=code),
        "The single rank trains the same parameters; what is frozen may not move. *Trains* says "
        "which (adapters start at random values), *away in phase 2* what leaves the device while "
        "the decoder works, in full separation (on the CPU: into other memory). The other columns "
        f"are those of parity.md, over layouts of 2 to {MOST_RANKS} ranks with sizes "
        "of 1 and 2; every value of a column meets every value of every other that it can be "
        "with.",
        "",
        *by_group("mode", _modes(results) | {"all": list(results)}),
        "",
        *by_group("trains", trained),
        "",
        *by_group("away in phase 2", away),
        *_models(results),
    ]
    return "\n".join(lines) + "\n"


def overlap_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page of cells with the experts' exchange overlapped."""
    kept, trains = _by(results, "kept", KEPT), _met(_by(results, "trained", TRAINED))
    (delayed,) = _by(results, "delayed", [True]).values()
    (shared,) = _by(results, "shared_experts", [True]).values()
    lines = [
        *page_head("Parity of the overlapped schedule of experts", results, whole=whole, code=code),
        "*Bits* are those of a second comparison, in bf16 over three steps, with the same layout "
        "without the overlap and without what goes with it: each rank's losses, gradient norms, "
        "gradients and parameters, with microbatches of text among them. *Kept* says what is kept "
        "of a layer's activations (docs/moe_overlap.md), *delayed* whether "
        "weights' gradients are computed late. Layouts are on as few ranks as they take; pipeline "
        "stages without virtual ones are refused, since Megatron's schedule has none. Every value "
        "of a column meets every value of every other that it can be with.",
        "",
        *by_group("mode", _modes(results) | {"all": list(results)}),
        "",
        *by_group("kept", kept),
        "",
        *by_group("trains", trains),
        "",
        *by_group("", {"delayed": delayed, "shared experts": shared}),
        *_models(results),
    ]
    return "\n".join(lines) + "\n"


def context_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page of cells whose rows lie on several ranks; a table of its own has the overlap's."""
    overlapped = [each for each in results if isinstance(each.cell, OverlappedContextCell)]
    plain = [each for each in results if each not in overlapped]
    by_ranks = {f"CP {cp}": found for cp, found in _by(results, "cp", CPS).items()}
    rows, ways = _by(results, "rows", ROWS), _by(results, "comm", COMM_TYPES)
    modes = _modes([each for each in plain if not each.cell.streams], CONTEXT_MODES)
    modes[_STREAMED_CONTEXT] = [each for each in plain if each.cell.streams]
    modes["any, experts' exchange overlapped"] = overlapped
    lines = [
        *page_head("Parity of context parallelism", results, whole=whole, code=code),
        "Each row's tokens lie on CP ranks (docs/context_parallelism.md). "
        "Encoders work in every mode, or lie *apart*, on ranks of their own behind the decoder's: "
        "*own ranks* are their TP/PP/DP. *Rows* are padded samples, or packs that are split alike "
        "(zigzag) or each by its samples (lpt). *Keys come by* is `--cp-comm-type`. *Away in phase "
        "2* is what leaves the device while the decoder works, in full separation. The "
        f"other columns are those of parity.md, over layouts of up to {MOST_RANKS} "
        "ranks with sizes of 1 and 2; every value of a column meets every value of every other "
        "that it can be with. Few cells stream. Few overlap the experts' exchange; they have a "
        "table at the end, whose last columns are those of parity_overlap.md, "
        "with the same second comparison, bit by bit.",
        "",
        *by_group("", by_ranks | {"all": list(results)}),
        "",
        *by_group("mode", modes),
        "",
        *by_group("rows", rows),
        "",
        *by_group("keys come by", ways),
        *_models(plain),
        *_models(overlapped, end=", experts' exchange overlapped"),
    ]
    return "\n".join(lines) + "\n"


def streamed_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page of full separation whose encoders fill the pipeline's bubbles."""
    trains = _met(_by(results, "trained", TRAINED))
    lines = [
        *page_head("Parity of streamed full separation", results, whole=whole, code=code),
        "Every layout of parity.md in full separation that has pipeline stages, each "
        "with whole replicas of the encoder, with `--full-hetero-dp-schedule streamed`. Where the "
        "clock says that a step would not be faster so, it is separated in these runs, too. Passes "
        "through the encoder count nothing there, so that there are many; of so small models plans "
        "would otherwise join nearly all. Every value of a column meets every value of every other "
        f"that it can be with; of {', '.join((*MORE_MODELS, *HEARING_MODELS))} there are few "
        "cells. The last one has two encoders, the first of which streams; what is frozen there is "
        "that of images.",
        "",
        "Adapters train with `--adam-eps 1e-3`, and so do the single rank's: with 1e-8, Adam makes "
        "whole steps of rounding where a gradient is nearly zero. Two of 56 such cells then parted "
        "in the second step, by 7.8e-05 in gradients and by 1.1e-04 in parameters; the first "
        "step's gradients agreed.",
        "",
        *by_group("trains", trains | {"all of them": list(results)}),
        *_models(results),
    ]
    return "\n".join(lines) + "\n"


def page_head(title: str, results: Sequence[Result], *, whole: int, code: str) -> Iterable[str]:
    """How every page begins."""
    agree = sum(result.agrees for result in results)
    return [
        f"# {title}",
        "",
        "Made by `./scripts/parity_matrix.sh`; do not edit. Each row is one layout of a small "
        "model on CPU ranks, held against a single rank on the same weights and samples for two "
        "steps, as docs/verify.md describes.",
        "",
        f"{len(results)} of {whole} cells: {agree} agree, {len(results) - agree} do not. The code "
        f"had the digest `{code}`.",
        "",
        f"The figures are the largest relative error of any gradient (limit {GRADIENT_LIMIT:.0e}), "
        f"of the gradient norm (limit {NORM_LIMIT:.0e}), of any microbatch's loss, and of any "
        "parameter.",
        "",
    ]


def _modes(results: Sequence[Result], modes: Sequence[str] = MODES) -> dict[str, list[Result]]:
    return _by(results, "mode", modes)


def _by[V](results: Sequence[Result], field: str, values: Iterable[V]) -> dict[V, list[Result]]:
    """Results by what their cells have there."""
    return {
        value: [each for each in results if getattr(each.cell, field) == value] for value in values
    }


def _met(groups: dict[str, list[Result]]) -> dict[str, list[Result]]:
    """Those that have some."""
    return {name: found for name, found in groups.items() if found}


def by_group(head: str, groups: Mapping[str, Sequence[Result]]) -> Iterable[str]:
    """A line for each group of what is worth a look of its own."""
    yield table_line([head, "cells", "agree", *(f"largest error: {name}" for name in FIGURES)])
    yield table_line(["---", *["---:"] * 6])
    for name, mine in groups.items():
        agree = sum(each.agrees for each in mine)
        columns = zip(*map(figures_of, mine), strict=True)
        largest = [f"{max(column):.1e}" for column in columns] or [""] * len(FIGURES)
        yield table_line([name, str(len(mine)), str(agree), *largest])


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
    yield table_line(["layout", "decoder TP/PP/DP", "encoder TP/PP/DP", "cells", "verdict"])
    yield table_line(["---"] * 3 + ["---:", "---"])
    for layout in TABLE_A8:
        yield table_line(_published_row(layout, results))


def _published_row(layout: PublishedLayout, results: Sequence[Result]) -> list[str]:
    mine = [each for each in results if layout.is_run_by(each.cell)]
    verdicts = dict.fromkeys(verdict_of(each) for each in mine)
    return [
        f"`{layout.name}`",
        f"{layout.tp} / {layout.pp} / {layout.dp}",
        f"{layout.encoder_tp} / 1 / {layout.encoder_dp}",
        str(len(mine)),
        ", ".join(verdicts) or "not run",
    ]


def _models(results: Sequence[Result], *, end: str = "") -> Iterable[str]:
    for model in dict.fromkeys(result.cell.model for result in results):
        mine = [result for result in results if result.cell.model == model]
        yield from ("", f"## {model}{end}", "", *_table(mine))


def _table(results: Sequence[Result]) -> Iterable[str]:
    more = _MORE[type(results[0].cell)]
    yield table_line([*_LAYOUT, *_OPTIONS, *more, *FIGURES, "verdict"])
    texts = ["---"] * (len(_OPTIONS) + len(more))
    yield table_line(["---", *["---:"] * 6, *texts, *["---:"] * 4, "---"])
    order = {mode: place for place, mode in enumerate(CONTEXT_MODES)}

    def place(result: Result) -> tuple[int, tuple[str, Cell]]:
        return order[result.cell.mode], result.cell.order

    for each in sorted(results, key=place):
        figures = ("" if each.loss is None else f"{figure:.1e}" for figure in figures_of(each))
        yield table_line([*_columns(each), *figures, verdict_of(each)])


def _columns(result: Result) -> Iterable[str]:
    bits = "" if result.failed else "**differ**" if result.bits else "same"
    for field in (*_LAYOUT.values(), *_OPTIONS.values(), *_MORE[type(result.cell)].values()):
        streamed = field == "mode" and isinstance(result.cell, StreamedContextCell)
        value = getattr(result.cell, field) if field else bits
        yield _STREAMED_CONTEXT if streamed else shown(value)


def shown(value: object) -> str:
    """As a table has it."""
    if isinstance(value, bool):
        return "yes" if value else ""
    return str(value)


def figures_of(result: Result) -> tuple[float, ...]:
    """Its largest errors, by :data:`FIGURES`."""
    figures = (result.gradients, result.gradient_norm, result.loss, result.parameters)
    return tuple(0.0 if figure is None else figure for figure in figures)


def verdict_of(result: Result) -> str:
    """The word of a table's last column."""
    if result.failed is not None:
        return "**failed**"
    return "agrees" if result.agrees else "**differs**"


def table_line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
