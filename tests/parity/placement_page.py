"""The page of cells with encoders on ranks of their own, made of their results."""

from collections.abc import Callable, Iterable, Sequence

from parity.parity_page import (
    FIGURES,
    by_group,
    figures_of,
    page_head,
    shown,
    table_line,
    verdict_of,
)
from parity.placement_cells import PlacementCell
from parity.results import Result

_COLUMNS = (
    *("model", "decoder", "encoders", "ranks", "VPP", "EP", "micro-batch", "SP", "recompute"),
    *("tied", "optimizer", "overlap", "trains", "rows"),
)
_NUMBERS = ("ranks", "VPP", "EP", "micro-batch")

_GROUPS: dict[str, Callable[[PlacementCell], bool]] = {
    "of table A7": lambda cell: cell.table == "A7",
    "of table A8": lambda cell: cell.table == "A8",
    "other numbers of replicas": lambda cell: any(dp != cell.dp for _, _, dp in cell.own_sizes),
    "decoder with stages": lambda cell: cell.pp > 1,
    "decoder with virtual stages": lambda cell: cell.vpp > 1,
    "encoder with stages": lambda cell: any(pp > 1 for _, pp, _ in cell.own_sizes),
    "split sequences": lambda cell: cell.sequence_parallel,
    "experts": lambda cell: "moe" in cell.model,
    "something frozen or adapted": lambda cell: cell.trained != "all",
    "two encoders": lambda cell: len(cell.encoders) > 1,
    "media left away": lambda cell: cell.rows != "whole",
    "all": lambda cell: True,
}


def placements_page(results: Sequence[Result], whole: int, code: str) -> str:
    """The page, of ``whole`` cells; the results are those of some ``code``."""
    cells = {id(each): _cell(each) for each in results}
    groups = {
        name: [each for each in results if belongs(cells[id(each)])]
        for name, belongs in _GROUPS.items()
    }
    lines = [
        *page_head("Parity of encoders on ranks of their own", results, whole=whole, code=code),
        "All encoders lie apart from the decoder (docs/placement.md). Sizes are "
        "TP/PP/DP; the encoders' ranks begin behind the decoder's. *Micro-batch* is that of a "
        "replica of the decoder, *overlap* that of the experts' exchange. *Rows* are verify's: "
        "whole, or without media (`text`; `text first`: in the first of the two steps), or with "
        "media of one kind alone. Deepstack's features travel in models of Qwen3-VL.",
        "",
        "Tables A7 (the decoder is frozen) and A8 are those of *Heterogeneous Parallelism for "
        "Multimodal Large Language Model Training* (Karnati et al.), with their sizes: four ranks "
        "for each module. Here the encoder trains in both.",
        "",
        *by_group("", groups),
        "",
        *_tables(results),
    ]
    return "\n".join(lines) + "\n"


def _tables(results: Sequence[Result]) -> Iterable[str]:
    """One for each published table, and one for all other cells."""
    for name, title in (("A7", "Table A7"), ("A8", "Table A8"), ("", "Other placements")):
        mine = [each for each in results if _cell(each).table == name]
        if not mine:
            continue
        yield from (f"## {title}", "")
        yield table_line([*_COLUMNS, *FIGURES, "verdict"])
        sides = ("---:" if each in _NUMBERS else "---" for each in _COLUMNS)
        yield table_line([*sides, *["---:"] * len(FIGURES), "---"])
        for each in mine:
            figures = ("" if each.loss is None else f"{figure:.1e}" for figure in figures_of(each))
            yield table_line([*_columns(_cell(each)), *figures, verdict_of(each)])
        yield ""


def _columns(cell: PlacementCell) -> Iterable[str]:
    sizes = (cell.ranks, cell.vpp, cell.ep, cell.micro_batch)
    options = (cell.sequence_parallel, cell.recompute, cell.tied, cell.optimizer, cell.overlap)
    yield from (cell.model, f"{cell.tp}/{cell.pp}/{cell.dp}", ", ".join(cell.own.split("|")))
    yield from map(shown, (*sizes, *options, cell.trained, cell.rows))


def _cell(result: Result) -> PlacementCell:
    assert isinstance(result.cell, PlacementCell), "the page is of such cells"
    return result.cell
