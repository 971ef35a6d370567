"""A step whose large products are oneDNN's, over two stages, against one rank of torch's own."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor
from verify_cases import PP2, TINY, Pair

from loongplug.models.layers import linear
from loongplug.verify.forked_runs import plan_runs
from loongplug.verify.plan import Request

# Wide enough, and no width is the number of a microbatch's tokens.
WIDE = ("model.image_encoder.hidden_size=128", "model.image_encoder.ffn_hidden_size=512")
ROWS = ("--seq-length", "80", "--micro-batch-size", "7", "--global-batch-size", "14")
# Linears as (in, out): queries, keys and values; their projection; MLP.
DECODER = {(128, 256), (128, 128), (128, 768), (384, 128)}
ENCODER = {(128, 384), (128, 512), (512, 128)}  # but the projection, which is small


@pytest.fixture(scope="module")
def pair(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The layout, and the single rank, whose products are torch's whatever their size."""
    folder = tmp_path_factory.mktemp("products")
    data = ("--tokenizer-model", str(demo / "processor"))
    rows = ("--train-data-path", str(demo / "train.jsonl"), *ROWS)
    plan = plan_runs(Request(flags=(*TINY, *data, *rows, *PP2, *WIDE), steps=1), folder=folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear, "_LARGE", sys.maxsize)
        return Pair(plan, folder)


@dataclass(frozen=True)
class Noted:
    """Each rank notes the products [m, k] by [n, k] that oneDNN is given, as (m, k, n)."""

    folder: Path

    def __call__(self, rank: int) -> None:
        kernel, file = linear._onednn, self.folder / str(rank)

        def noted(rows: Tensor, matrix: Tensor, *bias: Tensor | None) -> Tensor:
            with file.open("a") as lines:
                lines.write(json.dumps([*rows.shape, len(matrix)]) + "\n")
            return kernel(rows, matrix, *bias)

        linear._onednn = noted

    def of(self, rank: int) -> set[tuple[int, int, int]]:
        lines = (self.folder / str(rank)).read_text().splitlines()
        return {(m, k, n) for m, k, n in map(json.loads, lines)}


def all_of(linears: set[tuple[int, int]], *, rows: set[int]) -> set[tuple[int, int, int]]:
    """Of outputs, of gradients of inputs, and of gradients of weights."""
    return {
        each
        for count in rows
        for into, out in linears
        for each in ((count, into, out), (count, out, into), (out, count, into))
    }


def test_a_step_agrees_and_all_products_of_its_large_linears_are_onednns(
    pair: Pair, tmp_path: Path
) -> None:
    noted = Noted(tmp_path)
    pair.agreeing(noted)
    first, last = noted.of(0), noted.of(1)
    tokens = {m for m, k, n in last if (k, n) == (128, 256)}
    patches = {m for m, k, n in first if (k, n) == (128, 384)} - tokens - {128}
    assert patches
    assert last == all_of(DECODER, rows=tokens)
    assert first == last | all_of(ENCODER, rows=patches)
