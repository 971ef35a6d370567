"""An image's way to its values: by transformers' processor, and as bytes that become values."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil

from loongplug.data.media_loader import PixelBytes
from loongplug.data.processor import QwenPatches

_MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Way:
    """Bytes that go from a worker to the device, and milliseconds of a processor.

    ``made``: until they are there to go, in a worker; ``decoded``: what is left to do behind.
    """

    nbytes: int
    made: tuple[float, ...]
    decoded: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PixelFigures:
    """What was measured of one image."""

    height: int
    width: int
    by_transformers: Way
    as_bytes: Way


def run(*, height: int, width: int, rounds: int, json_path: Path | None) -> PixelFigures:
    """Measure in turn with one thread, print a table, write the figures to ``json_path`` if given.

    Values of both sides are the same bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = _measured(height=height, width=width, rounds=rounds)
    finally:
        torch.set_num_threads(threads)
    _print(figures)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return figures


def _measured(*, height: int, width: int, rounds: int) -> PixelFigures:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    limits = {"shortest_edge": 1, "longest_edge": 2 * height * width}
    transform = Qwen2VLImageProcessorPil(patch_size=16, size=limits)
    patches = QwenPatches(transform)

    def theirs() -> Tensor:
        found: Tensor = transform(images=[image], return_tensors="pt")["pixel_values"]
        return found

    def ours() -> Tensor:
        ((rows, _),) = patches.coded([image])
        return rows

    values, rows = theirs(), ours()
    assert torch.equal(values, PixelBytes.of_images(patches).decoded(rows)), "other pixels"
    made: dict[Callable[[], Tensor], list[float]] = {theirs: [], ours: []}
    decoded: list[float] = []
    for _ in range(rounds):
        for make, taken in made.items():
            began = process_time()
            make()
            taken.append((process_time() - began) * 1e3)
        began = process_time()
        PixelBytes.of_images(patches).decoded(rows)
        decoded.append((process_time() - began) * 1e3)
    return PixelFigures(
        height=height,
        width=width,
        by_transformers=Way(nbytes=values.nbytes, made=tuple(made[theirs]), decoded=()),
        as_bytes=Way(nbytes=rows.nbytes, made=tuple(made[ours]), decoded=tuple(decoded)),
    )


def _print(figures: PixelFigures) -> None:
    table = Table(
        "way",
        "MB",
        "in a worker, ms",
        "behind it, ms",
        title=f"an image of {figures.width} x {figures.height} pixels, processor time",
    )
    for name, way in (
        ("transformers", figures.by_transformers),
        ("as bytes", figures.as_bytes),
    ):
        behind = f"{median(way.decoded):.1f}" if way.decoded else ""
        table.add_row(name, f"{way.nbytes / _MB:.1f}", f"{median(way.made):.1f}", behind)
    Console().print(table)
