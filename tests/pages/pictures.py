"""Pictures of figures of the pages: ``PYTHONPATH=tests python -m pages.pictures`` draws them.

``docs/which_mode.svg`` is of ``docs/which_mode.csv``, which ``benchmarks/bench.py pipeline-tables
modes`` prints; ``docs/levels.svg`` is of the table of levels in ``docs/benchmarks.md``.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from pages.commands import ROOT, section

MODES, WHICH_MODE = ROOT / "docs" / "which_mode.csv", ROOT / "docs" / "which_mode.svg"
LEVELS, LEVELS_PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "levels.svg"

_ALIKE: Final = 1.03  # modes whose steps are no further apart win together
_WIDTH: Final = 400
_LEFT, _WIDE, _APART, _HIGH, _MOST = 30, 114, 10, 150, 5.0  # of a panel of modes
_COLOURS: Final = {  # by mode, with the dashes of its line
    "streamed": ("#00856a", ""),
    "full_hetero_dp": ("#1f5fbf", ""),
    "own_ranks": ("#d9730d", ""),
    "uniform tuned": ("#777777", "2 2"),
    "uniform": ("#222222", ""),
    "encoder_hetero_dp": ("#a33ea1", "5 3"),
}
_BARS: Final = {"uniform": "#999999", "uniform tuned": "#777777"}  # those of other levels are blue


@dataclass(frozen=True, kw_only=True)
class Measured:
    """``step`` is over the perfect one, by mode; ``share`` is the encoder's, in percent."""

    stages: int
    microbatches: int
    share: int
    step: Mapping[str, float]

    @property
    def fastest(self) -> list[str]:
        """The modes whose step is no more than 3 % above the least."""
        least = min(self.step.values())
        return [mode for mode, step in self.step.items() if step <= least * _ALIKE]


def measured(text: str) -> list[Measured]:
    """The settings of ``which_mode.csv``."""
    rows = list(csv.DictReader(text.splitlines()))
    return [
        Measured(
            stages=int(stages),
            microbatches=int(microbatches),
            share=int(share.rstrip("%")),
            step={row["mode"]: float(row["step"]) for row in of_setting},
        )
        for (stages, microbatches, share), of_setting in groupby(
            rows, key=lambda row: (row["stages"], row["microbatches"], row["encoder"])
        )
    ]


def which_mode(found: Sequence[Measured]) -> str:
    """A panel for each number of stages and of microbatches, a line for each mode."""
    stages = sorted({each.stages for each in found})
    microbatches = sorted({each.microbatches for each in found})
    shares = sorted({each.share for each in found})
    drawn = [
        _text(4, 16, "Time of a step over the perfect step", weight="bold"),
        _text(4, 31, "lowest line: fastest; full dot: at most 3 % above the fastest"),
    ]
    for number, (mode, (colour, dashes)) in enumerate(_COLOURS.items()):
        x, y = (4, 124, 250)[number % 3], 50 + number // 3 * 16
        drawn += [_line([(x, y - 4), (x + 18, y - 4)], colour, dashes), _text(x + 23, y, mode)]
    for row, of_step in enumerate(microbatches):
        for column, of_pipeline in enumerate(stages):
            of_panel = {
                each.share: each
                for each in found
                if (each.stages, each.microbatches) == (of_pipeline, of_step)
            }
            left, top = _LEFT + column * (_WIDE + _APART), 100 + row * (_HIGH + 40)
            title = f"{of_pipeline} stages, {of_step} mb"
            drawn += _panel(of_panel, shares, left=left, top=top, title=title, labels=not column)
    bottom = 100 + len(microbatches) * (_HIGH + 40)
    below = "encoder's share of all work; mb: microbatches"
    drawn.append(_text(_WIDTH / 2, bottom, below, "middle"))
    return _svg(drawn, height=bottom + 10, title="Which mode is the fastest")


def _panel(
    found: Mapping[int, Measured],
    shares: Sequence[int],
    *,
    left: float,
    top: float,
    title: str,
    labels: bool,
) -> list[str]:
    def x(share: int) -> float:
        return left + 14 + (_WIDE - 28) * shares.index(share) / (len(shares) - 1)

    def y(step: float) -> float:
        return top + _HIGH * (1 - math.log(step) / math.log(_MOST))

    drawn = [_text(left + _WIDE / 2, top - 6, title, "middle")]
    for tick in (1, 1.5, 2, 3, 4, 5):
        drawn.append(_line([(left, y(tick)), (left + _WIDE, y(tick))], "#dddddd", width=1))
        if labels:
            drawn.append(_text(left - 4, y(tick) + 4, f"{tick:g}", "end"))
    drawn += [_text(x(share), top + _HIGH + 14, f"{share} %", "middle") for share in shares]
    for mode, (colour, dashes) in reversed(_COLOURS.items()):  # the fastest above the others
        points = [(x(share), y(each.step[mode])) for share, each in found.items()]
        drawn.append(_line(points, colour, dashes))
        for (at, high), each in zip(points, found.values(), strict=True):
            fill = colour if mode in each.fastest else "#ffffff"
            drawn.append(
                f'<circle cx="{at:.1f}" cy="{high:.1f}" r="3" fill="{fill}" stroke="{colour}"/>'
            )
    return drawn


def levels(page: str) -> dict[str, dict[str, float]]:
    """By setting and level, the rate over uniform's, from the table of levels."""
    found: dict[str, dict[str, float]] = {}
    for line in section(page, "Levels").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"\d\.\d\d", cells[3]):
            found.setdefault(cells[0], {})[cells[1]] = float(cells[3])
    return found


def levels_picture(found: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each level, those of a setting together."""
    names, most = 166, max(max(each.values()) for each in found.values())
    drawn = [_text(4, 16, "Tokens per second over those of uniform", weight="bold")]
    y = 20.0
    for setting, by_level in found.items():
        y += 22
        drawn.append(_text(4, y, setting, weight="bold"))
        for level, rate in by_level.items():
            y += 17
            wide = (_WIDTH - names - 40) * rate / most
            drawn += [
                _text(names - 6, y, level, "end"),
                f'<rect x="{names}" y="{y - 11:.1f}" width="{wide:.1f}" height="13"'
                f' fill="{_BARS.get(level, "#1f5fbf")}"/>',
                _text(names + wide + 4, y, f"{rate:.2f}"),
            ]
    return _svg(drawn, height=y + 10, title="Tokens per second of each level over uniform's")


def _svg(drawn: Sequence[str], *, height: float, title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}"'
        ' font-family="sans-serif" font-size="11" fill="#222222">'
    )
    paper = f'<rect width="{_WIDTH}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{title}</title>", paper, *drawn, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", *, weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-weight="{weight}">{text}</text>'


def _line(
    points: Sequence[tuple[float, float]], colour: str, dashes: str = "", *, width: float = 1.8
) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = f'stroke="{colour}" stroke-width="{width:g}" stroke-dasharray="{dashes or "none"}"'
    return f'<polyline points="{joined}" fill="none" {stroke}/>'


def main() -> None:
    """Draw them."""
    modes = measured(MODES.read_text(encoding="utf-8"))
    WHICH_MODE.write_text(which_mode(modes), encoding="utf-8")
    of_levels = levels(LEVELS.read_text(encoding="utf-8"))
    LEVELS_PICTURE.write_text(levels_picture(of_levels), encoding="utf-8")


if __name__ == "__main__":
    main()
