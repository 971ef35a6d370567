"""The demo's pictures: scans of handwritten digits, drawn on sheets of several sizes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TEST_SCANS = 297

_BRIGHTEST = 16  # the scans' grey levels are 0 to 16
_USUAL_SIZE = (32, 32)  # height, width: one visual token
_OTHER_SIZES = ((64, 32), (32, 64), (64, 64))
_USUAL_SHARE = 0.8
_MOST_OTHERS = 3  # per sample, which bounds its length
_MOST_TURN = 10  # degrees, either way
_MOST_SHIFT = 2  # pixels of the usual size, each way


@dataclass(frozen=True)
class Picture:
    """A scan on a sheet; variant 0 is the scan as it is, others are turned and moved a little."""

    scan: int
    size: tuple[int, int]  # height, width
    variant: int = 0

    @property
    def path(self) -> str:
        """Where it lies in the demo's folder."""
        height, width = self.size
        variant = f"-{self.variant}" if self.variant else ""
        return f"images/{self.scan:04d}-{height}x{width}{variant}.png"


@dataclass(frozen=True, kw_only=True)
class Scans:
    """All scans, and which of them are for test samples alone."""

    images: NDArray[np.float64]  # [1797, 8, 8]
    digits: list[int]  # that each shows
    train: list[int]
    test: list[int]


def load_scans(*, seed: int) -> Scans:
    """The scans that scikit-learn brings along, split by ``seed``."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "The demo data come with scikit-learn, which is not installed: pip install"
            " 'loongplug[demo]'."
        ) from error
    data = load_digits()
    order = list(range(len(data.images)))
    random.Random(f"{seed} split").shuffle(order)
    return Scans(
        images=data.images,
        digits=data.target.tolist(),
        train=order[TEST_SCANS:],
        test=order[:TEST_SCANS],
    )


def draw_sizes(rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Sizes of a sample's sheets: height, width."""
    others = 0
    for _ in range(count):
        if others < _MOST_OTHERS and rng.random() >= _USUAL_SHARE:
            others += 1
            yield rng.choice(_OTHER_SIZES)
        else:
            yield _USUAL_SIZE


def write_picture(picture: Picture, out: Path, *, of: NDArray[np.float64]) -> None:
    """A larger image is a larger sheet: the scan ``of`` [8, 8] lies in a half or quarter of it."""
    if (out / picture.path).exists():
        return  # the same one, by its name
    height, width = picture.size
    scan_height, scan_width = _USUAL_SIZE
    rows, columns = height // scan_height, width // scan_width
    row, column = divmod(picture.scan % (rows * columns), columns)
    grey = np.round(of * (255 / _BRIGHTEST)).astype(np.uint8)
    enlarged = Image.fromarray(grey).resize((scan_width, scan_height), Image.Resampling.BICUBIC)
    if picture.variant:
        rng = random.Random(f"{picture.scan} {picture.variant}")
        enlarged = enlarged.rotate(
            rng.uniform(-_MOST_TURN, _MOST_TURN),
            Image.Resampling.BILINEAR,
            translate=(_shift(rng), _shift(rng)),
        )
    sheet = Image.new("L", (width, height))
    sheet.paste(enlarged, (column * scan_width, row * scan_height))
    sheet.save(out / picture.path)


def _shift(rng: random.Random) -> int:
    return rng.randint(-_MOST_SHIFT, _MOST_SHIFT)
