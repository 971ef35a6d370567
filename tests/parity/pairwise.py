"""Few cells of many: those in which every two values of two axes meet."""

import random
from collections.abc import Sequence
from itertools import combinations

from parity.cells import Cell

Pair = tuple[str, object, str, object]  # an axis, its value, and another
CANDIDATES = 400  # that are looked at for the next cell


def few_of(everything: Sequence[Cell], axes: Sequence[str]) -> list[Cell]:
    """Cells until each value of an axis was with each of the first axis that it can be with."""
    cover = Cover(axes, with_first_alone=True)
    candidates = [cover.candidate(cell) for cell in everything]
    while cover.wanted:
        cover.take_best(candidates)
    return sorted(cover.cells)


def one_of_each(
    everything: Sequence[Sequence[Cell]], axes: Sequence[str], *, seed: str
) -> list[Cell]:
    """A cell of each list, and more until every two axis values have met that can."""
    cover = Cover(axes)
    lists = [[cover.candidate(cell) for cell in possible] for possible in everything]
    generator = random.Random(seed)
    for possible in lists:
        generator.shuffle(possible)  # so that where nothing is wanted any more, options vary
        cover.take_best(possible)
    while cover.wanted:
        cover.take_best([candidate for possible in lists for candidate in possible])
    return sorted(cover.cells)


def covering(everything: Sequence[Cell], axes: Sequence[str], *, seed: str) -> list[Cell]:
    """Few cells in which every two axis values meet: always the best of some candidates."""
    cover = Cover(axes)
    possible = [cover.candidate(cell) for cell in everything]
    generator = random.Random(seed)
    while cover.wanted:
        drawn = generator.sample(possible, min(CANDIDATES, len(possible)))
        if not any(found & cover.wanted for _, found in drawn):
            drawn = possible
        cover.take_best(drawn)
    return sorted(cover.cells)


class Cover:
    """Cells that are taken one by one, each for the pairs of values that those before lack.

    A pair is a bit, and a cell that may be taken an integer of them: a matrix looks at eighty
    thousand cells, and each has up to two hundred pairs. ``with_first_alone``: only pairs with a
    value of the first axis count.
    """

    MOST_VALUES = 128  # of all axes

    def __init__(self, axes: Sequence[str], *, with_first_alone: bool = False) -> None:
        self._axes = axes
        self._with_first_alone = with_first_alone
        self._numbers: dict[tuple[str, object], int] = {}  # of a value of an axis
        self.wanted = 0
        self.cells: list[Cell] = []

    def candidate(self, cell: Cell) -> tuple[Cell, int]:
        """The cell with its pairs, which are wanted from now on."""
        found = met = 0
        for axis in self._axes:
            number = self._numbers.setdefault((axis, getattr(cell, axis)), len(self._numbers))
            assert number < self.MOST_VALUES
            found |= met << (number * self.MOST_VALUES)  # it meets those of the axes before
            if not (met and self._with_first_alone):
                met |= 1 << number
        self.wanted |= found
        return cell, found

    def take_best(self, candidates: Sequence[tuple[Cell, int]]) -> None:
        """Take the first of those that have most of what is wanted."""
        cell, found = max(candidates, key=lambda each: (each[1] & self.wanted).bit_count())
        self.cells.append(cell)
        self.wanted &= ~found


def pairs(cell: Cell, axes: Sequence[str]) -> set[Pair]:
    """Every two values of two axes that meet in the cell."""
    values = [(axis, getattr(cell, axis)) for axis in axes]
    return {(*one, *other) for one, other in combinations(values, 2)}
