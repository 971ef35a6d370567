"""What fuzzed runs came to: which faults happened, where, and which options were drawn.

A fault that no longer happens (a function that nobody calls any more) would leave a fuzz in which
nothing is ever wrong. ``never`` names what enough draws should have come to and did not.
"""

from collections import Counter
from dataclasses import dataclass, field

from attempts import FAILED, TERMINATED, WHOLE, Ending
from drawn_options import EXTRAS, MODELS, MODES, ROWS, TRAINS
from draws import HAPPENINGS, UNFIRED, Draw
from rich.box import SIMPLE_HEAD
from rich.table import Table

# So many draws come to everything that there is.
ENOUGH = 300
WRONG = "wrong"
ENDS = (WHOLE, TERMINATED, FAILED, WRONG)


@dataclass
class Tally:
    """Counts of draws: by kind and place, and by option."""

    drawn: Counter[tuple[str, str]] = field(default_factory=Counter)
    happened: Counter[tuple[str, str]] = field(default_factory=Counter)
    ended: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    options: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many draws."""
        return self.drawn.total()

    @property
    def wrong(self) -> int:
        """How many ended otherwise than they have to."""
        return sum(count for (*_, end), count in self.ended.items() if end == WRONG)

    def add(self, draw: Draw, ending: Ending | None) -> None:
        """Count a draw; ``ending`` is None for a wrong one."""
        case = draw.fault.kind, draw.where
        self.drawn[case] += 1
        end = WRONG if ending is None else end_of(ending)
        self.ended[*case, end] += 1
        if ending is not None and happened(draw, ending):
            self.happened[case] += 1
        for option in options_of(draw):
            self.options[option] += 1

    def never(self) -> list[str]:
        """Kinds of faults and their places that happened in no draw, options that none had."""
        places = sorted({place for each in HAPPENINGS.values() for place in each if place})
        return [
            *(f"the fault {kind}" for kind in HAPPENINGS if not self._count(kind=kind)),
            *(f"a fault at {place}" for place in places if not self._count(place=place)),
            *(f"the {what} {option}" for what, option in OPTIONS if not self.options[what, option]),
        ]

    def _count(self, *, kind: str | None = None, place: str | None = None) -> int:
        return sum(
            count
            for (its_kind, its_place), count in self.happened.items()
            if kind in (None, its_kind) and place in (None, its_place)
        )

    def table(self) -> Table:
        """Of each fault at each place: how many were drawn, how many happened, how runs ended."""
        heads = ("fault", "at", "drawn", "happened", *ENDS)
        table = Table(*heads, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for kind, places in HAPPENINGS.items():
            for place in places:
                ends = (self.ended[kind, place, end] for end in ENDS)
                counts = (self.drawn[kind, place], self.happened[kind, place], *ends)
                table.add_row(kind, place, *(str(count or "") for count in counts))
        return table

    def drawn_options(self) -> str:
        """How many draws had which option, on a line for each choice."""
        lines: dict[str, list[str]] = {}
        for what, option in OPTIONS:
            lines.setdefault(what, []).append(f"{option} {self.options[what, option]}")
        return "\n".join(f"{what}: {', '.join(counts)}" for what, counts in lines.items())


_CHOICES = {
    "model": MODELS,
    "mode": MODES,
    "rows": ROWS,
    "trains": TRAINS,
    "extra": EXTRAS,
    "resume": ("alone", "elsewhere", "restart"),
    "ranks of a row": ("2", "3", "2, packs", "3, packs"),
    "keys by": ("all_gather", "a2a", "p2p"),
}
OPTIONS = tuple((what, option) for what, options in _CHOICES.items() for option in options)


def options_of(draw: Draw) -> list[tuple[str, str]]:
    """Of OPTIONS, what a draw has."""
    resume = "alone" if draw.resume.ranks == 1 else "elsewhere"
    return [
        ("model", draw.model),
        ("mode", draw.mode),
        ("rows", draw.rows),
        ("trains", draw.trains),
        *(("extra", extra) for extra in draw.extras),
        ("resume", "restart" if draw.restart else resume),
        ("ranks of a row", f"{draw.layout.cp}{', packs' if draw.packed else ''}"),
        *((("keys by", draw.layout.comm or "all_gather"),) if draw.layout.cp > 1 else ()),
    ]


def end_of(ending: Ending) -> str:
    """How a run ended as a whole; a killed rank fails it."""
    for way in (WHOLE, TERMINATED):
        if set(ending.ways) == {way}:
            return way
    return FAILED


def happened(draw: Draw, ending: Ending) -> bool:
    """Whether a run met what its draw has in store: for none, that it came to its end."""
    if draw.fault.kind == "none":
        return end_of(ending) == WHOLE
    if draw.fault.kind == "sigterm":
        return ending.fired and end_of(ending) == TERMINATED
    if draw.fault.kind in UNFIRED and draw.where != "export's end":
        return end_of(ending) == FAILED
    return ending.fired
