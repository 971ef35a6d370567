"""Stage times that Cornstarch published: its tables 3, 10 and 11, in milliseconds."""

from dataclasses import dataclass

MICROBATCHES = 24


@dataclass(frozen=True)
class Timed:
    """Forward and backward of each encoder stage and of each decoder stage, inputs/s/GPU."""

    encoder: tuple[float, float]
    decoder: tuple[float, float]
    rate: float


@dataclass(frozen=True)
class Row:
    """``stages``: of the encoder and of the decoder, with the frozen-aware split (table 9)."""

    aware: Timed
    unaware: Timed
    stages: tuple[int, int]

    def inferred(self) -> tuple[int, int]:
        """Stages of the unaware split: as many as have the same forward in all.

        Table 9 has other numbers, which the stage times contradict.
        """
        pairs = (
            (self.aware.encoder, self.unaware.encoder, self.stages[0]),
            (self.aware.decoder, self.unaware.decoder, self.stages[1]),
        )
        encoder, decoder = (
            max(1, round(number * aware[0] / unaware[0])) for aware, unaware, number in pairs
        )
        return encoder, decoder


def _row(aware: tuple[float, ...], unaware: tuple[float, ...], stages: tuple[int, int]) -> Row:
    first, second = (
        Timed(encoder=(a, b), decoder=(c, d), rate=rate) for a, b, c, d, rate in (aware, unaware)
    )
    return Row(aware=first, unaware=second, stages=stages)


TABLE_3 = {
    "VLM-S": _row((49.06, 0.12, 27.46, 43.03, 6.47), (26.49, 0.16, 28.13, 51.32, 5.30), (1, 6)),
    "VLM-M": _row((75.04, 0.27, 28.15, 51.30, 5.15), (45.90, 0.16, 45.26, 84.89, 3.73), (2, 5)),
    "ALM-S": _row((57.25, 0.38, 81.73, 157.12, 1.94), (57.79, 0.38, 81.94, 157.14, 1.94), (1, 6)),
    "ALM-M": _row((176.80, 0.64, 82.19, 157.51, 1.96), (93.39, 0.34, 98.25, 189.11, 1.70), (1, 6)),
    "VLM-L": _row((101.02, 0.20, 34.67, 63.77, 3.17), (70.42, 0.15, 67.03, 127.34, 2.06), (4, 5)),
    "ALM-L": _row(
        (308.16, 0.73, 100.20, 188.50, 1.98), (145.97, 0.33, 121.21, 235.23, 1.69), (2, 4)
    ),
}
TABLE_10 = {
    "VLM-S": _row((25.57, 0.05, 15.51, 15.09, 12.64), (32.80, 0.06, 18.80, 20.09, 13.79), (2, 4)),
    "VLM-M": _row((75.67, 0.15, 17.31, 20.08, 7.85), (45.25, 0.09, 17.61, 20.33, 7.63), (4, 2)),
    "VLM-L": _row((98.27, 0.11, 26.22, 30.50, 4.81), (122.50, 0.13, 47.39, 60.31, 6.05), (4, 1)),
    "ALM-S": _row((57.52, 0.20, 42.73, 70.21, 7.13), (30.14, 0.10, 42.30, 70.22, 5.34), (1, 5)),
    "ALM-M": _row((92.19, 0.17, 32.54, 52.63, 4.85), (59.18, 0.12, 72.90, 105.22, 4.09), (2, 4)),
    "ALM-L": _row((97.77, 0.12, 33.27, 52.88, 4.29), (76.81, 0.09, 62.01, 105.22, 3.59), (3, 4)),
}
TABLE_11 = {
    "VLM-S": _row((52.54, 0.10, 88.58, 171.72, 2.39), (85.83, 0.10, 106.26, 171.38, 2.10), (1, 5)),
    "VLM-M": _row(
        (249.38, 0.49, 88.95, 171.68, 2.29), (132.16, 0.26, 113.64, 213.58, 1.85), (1, 5)
    ),
    "VLM-L": _row(
        (481.44, 0.74, 106.53, 215.06, 1.76), (246.22, 0.38, 146.62, 287.14, 1.81), (1, 4)
    ),
    "ALM-S": _row((76.84, 0.24, 286.16, 596.40, 0.72), (78.80, 0.24, 285.07, 594.31, 0.73), (1, 5)),
    "ALM-M": _row(
        (197.21, 0.45, 287.37, 597.47, 0.72), (101.97, 0.24, 359.27, 743.91, 0.62), (1, 5)
    ),
    "ALM-L": _row(
        (319.31, 0.50, 286.31, 596.50, 0.71), (177.29, 0.27, 356.06, 742.80, 0.61), (1, 5)
    ),
}
