"""What fuzzed runs came to: which faults happened, where, and which options were drawn.

A fault that no longer happens (a function that nobody calls any more) would leave a fuzz in which
nothing is ever wrong. ``shortcomings`` names what enough draws should have come to and did not.
"""

from collections import Counter
from collections.abc import Iterator

from attempts import FAILED, TERMINATED, WHOLE, Ending
from drawn_cells import EXTRAS, MODELS, MODES, TRAINED, mode_of
from draws import HAPPENINGS, ROWS, UNFIRED, Draw
from parity.option_flags import FLAGS
from rich.box import SIMPLE_HEAD
from rich.table import Table

# So many draws come to everything that there is.
ENOUGH = 300
WRONG = "wrong"
ENDS = (WHOLE, TERMINATED, FAILED, WRONG)
OPTIONS: dict[str, tuple[object, ...]] = {
    "model": MODELS,
    "mode": MODES,
    "rows": ROWS,
    "trained": TRAINED,
    **{axis: tuple(FLAGS[axis]) for axis in ("optimizer", "away", "recompute")},
    "extra": tuple(EXTRAS),
    "resume": ("alone", "elsewhere", "restart"),
    "ranks of a row": ("1", "2", "3", "2, packs", "3, packs"),
    "keys by": ("all_gather", "a2a", "p2p"),
}


class Tally:
    """Counts of draws by fault and place, of their ends, and of each option."""

    def __init__(self) -> None:
        self.happened: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[tuple[str, str, str]] = Counter()
        self.options: Counter[tuple[str, object]] = Counter()

    @property
    def total(self) -> int:
        """How many draws."""
        return self.ended.total()

    @property
    def wrong(self) -> int:
        """How many ended otherwise than they have to."""
        return sum(count for (*_, end), count in self.ended.items() if end == WRONG)

    def add(self, draw: Draw, ending: Ending | None) -> None:
        """Count a draw; ``ending`` is None for a wrong one."""
        case = draw.fault.kind, draw.where
        self.ended[*case, WRONG if ending is None else end_of(ending)] += 1
        self.happened[case] += ending is not None and happened(draw, ending)
        self.options.update(options_of(draw))

    def shortcomings(self) -> list[str]:
        """Why the fuzz fails: draws that end wrong, and what so many should have come to."""
        wrong = [f"{self.wrong} draws end otherwise than they have to"] if self.wrong else []
        never = self._never() if self.total >= ENOUGH else ()
        return wrong + [f"{self.total} draws have never come to {each}" for each in never]

    def _never(self) -> Iterator[str]:
        seen = {name for case, count in self.happened.items() if count for name in case}
        yield from (f"the fault {kind}" for kind in HAPPENINGS if kind not in seen)
        places = sorted({place for each in HAPPENINGS.values() for place in each if place})
        yield from (f"a fault at {place}" for place in places if place not in seen)
        for what, values in OPTIONS.items():
            yield from (f"the {what} {each}" for each in values if not self.options[what, each])

    def table(self) -> Table:
        """Of each fault at each place: how many were drawn, how many happened, how runs ended."""
        heads = ("fault", "at", "drawn", "happened", *ENDS)
        table = Table(*heads, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for kind, places in HAPPENINGS.items():
            for place in places:
                ends = [self.ended[kind, place, end] for end in ENDS]
                counts = (sum(ends), self.happened[kind, place], *ends)
                table.add_row(kind, place, *(str(count or "") for count in counts))
        return table

    def drawn_options(self) -> str:
        """How many draws had which option, on a line for each choice."""
        return "\n".join(
            f"{what}: {', '.join(f'{each} {self.options[what, each]}' for each in values)}"
            for what, values in OPTIONS.items()
        )


def options_of(draw: Draw) -> Iterator[tuple[str, object]]:
    """Of OPTIONS, what a draw has."""
    cell, resume = draw.cell, "alone" if draw.resume.ranks == 1 else "elsewhere"
    yield from (("model", cell.model), ("mode", mode_of(cell)), ("rows", draw.rows))
    yield from ((axis, getattr(cell, axis)) for axis in ("trained", "optimizer", "away"))
    yield from (("recompute", cell.recompute), *(("extra", extra) for extra in draw.extras))
    yield "resume", "restart" if draw.restart else resume
    yield "ranks of a row", f"{cell.cp}{'' if cell.rows == 'padded' else ', packs'}"
    if cell.cp > 1:
        yield "keys by", cell.comm


def end_of(ending: Ending) -> str:
    """How a run ended as a whole; a killed rank fails it."""
    ways = {*ending.ways}
    return ending.ways[0] if ways in ({WHOLE}, {TERMINATED}) else FAILED


def happened(draw: Draw, ending: Ending) -> bool:
    """Whether a run met what its draw has in store: for none, that it came to its end."""
    if draw.fault.kind == "none":
        return end_of(ending) == WHOLE
    if draw.fault.kind == "sigterm":
        return ending.fired and end_of(ending) == TERMINATED
    if draw.fault.kind in UNFIRED and draw.where != "export's end":
        return end_of(ending) == FAILED
    return ending.fired
