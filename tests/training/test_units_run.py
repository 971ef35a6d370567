"""Who decodes what in whole runs, and bad samples that all ranks leave out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_images import cut
from layout_flags import TP2_PP2, VIRTUAL
from PIL import Image
from ranks import RankError, run_ranks

from loongplug.data import loader, media_kinds
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.microbatch import Microbatch
from loongplug.data.sample import Sample
from loongplug.parallel.failure import failure_board
from loongplug.training.run import run


@pytest.fixture(scope="module")
def flags(flags, weights):
    """With weights, so that runs in several layouts can be compared."""
    return [*flags, "--load-hf", weights]


def observed(rank: int, *, flags: list[str]) -> dict[str, Any]:
    """A run's losses, and what this rank decoded: by its counter, and by the calls in its process.

    Also which rows it put into microbatches with no token that counts.
    """
    loaders: list[MicrobatchLoader] = []
    calls = 0
    untrained: list[int] = []
    decode, original, collated = media_kinds.decode_image, MicrobatchLoader.__next__, loader.collate
    heard = Microbatch.heard

    def counting(*args: Any, **kwargs: Any) -> Image.Image:
        nonlocal calls
        calls += 1
        return decode(*args, **kwargs)

    def next_microbatch(self: MicrobatchLoader) -> Any:
        if self not in loaders:
            loaders.append(self)
        return original(self)

    def collate(samples: Sequence[Sample], **options: Any) -> Any:
        untrained.extend(n for n, sample in enumerate(samples) if not sample.loss_mask.any())
        return collated(samples, **options)

    def hearing(self: Microbatch) -> Microbatch:
        untrained.extend(() if (found := heard(self)) is self else (found.number,))
        return found

    media_kinds.decode_image, MicrobatchLoader.__next__ = counting, next_microbatch
    loader.collate, Microbatch.heard = collate, hearing
    losses = [step.loss for step in run(flags)]
    counted = sum(each.source.decoded for each in loaders)
    return {"losses": losses, "decoded": counted, "calls": calls, "untrained": untrained}


def observe(flags: list[str], *more: str, ranks: int) -> list[dict[str, Any]]:
    return run_ranks(observed, ranks, flags=[*flags, *more], timeout=120.0)


@pytest.fixture(scope="module")
def alone(flags):
    (single,) = observe(flags, ranks=1)
    return single


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "decoding"),
    [(TP2_PP2, 4, {0}), (VIRTUAL, 4, {0, 1})],
    ids=["tp2-pp2", "pp2-vpp2-dp2"],
)
def test_one_rank_of_the_first_stage_decodes_each_image_once(flags, alone, layout, ranks, decoding):
    assert alone["decoded"] == alone["calls"] > 30
    found = observe(flags, *layout, ranks=ranks)
    assert {rank for rank, each in enumerate(found) if each["calls"]} == decoding
    assert all(each["decoded"] == each["calls"] for each in found)
    # Caches are each rank's own, so that two replicas may decode one image twice.
    assert sum(each["calls"] for each in found) >= alone["calls"]
    assert found[0]["calls"] <= alone["calls"]
    torch.testing.assert_close(found[0]["losses"], alone["losses"], rtol=2e-5, atol=0)


@pytest.fixture(scope="module")
def truncated(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """Rows of which one has an image with a good header and half its pixels; the same rows with
    that row's answer left untrained; and its number.
    """
    folder = tmp_path_factory.mktemp("truncated")
    rows = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()[:8]]
    number = next(i for i, row in enumerate(rows) if '"image"' in json.dumps(row))
    for row in rows:
        for part in row["messages"][0]["content"]:
            if part["type"] == "image":
                part["image"] = str(demo / part["image"])
    good = folder / "good.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = good.read_text().splitlines()
    lines[number] = cut(lines[number], source=demo, folder=folder)
    bad = folder / "bad.jsonl"
    bad.write_text("\n".join(lines) + "\n")
    return bad, good, number


def without(rank: int, *, flags: list[str], number: int) -> list[float]:
    """Losses of a run whose sample ``number`` counts for nothing."""
    from loongplug.data.dataset import ChatDataset

    original = ChatDataset.__getitem__

    def untrained(self: ChatDataset, index: int) -> Any:
        sample = original(self, index)
        mask = sample.loss_mask * (index != number)
        return replace(sample, loss_mask=mask)

    ChatDataset.__getitem__ = untrained
    return [step.loss for step in run(flags)]


@pytest.fixture(scope="module")
def left_out(flags, truncated) -> list[float]:
    """Losses of a single rank without the sample, whose tokens would count otherwise."""
    _, good, number = truncated
    # Each step is one epoch of the eight rows.
    data = ("--train-data-path", str(good))
    (whole,) = run_ranks(without, 1, flags=[*flags, *data], number=-1, timeout=120.0)
    (expected,) = run_ranks(without, 1, flags=[*flags, *data], number=number, timeout=120.0)
    assert abs(whole[0] - expected[0]) > 1e-4
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [(TP2_PP2, 4), (VIRTUAL, 2)],
    ids=["tp2-pp2", "pp2-vpp2"],
)
def test_a_truncated_image_leaves_its_sample_out_on_every_rank(
    flags, truncated, left_out, tmp_path, layout, ranks
):
    bad, _, _ = truncated
    metrics = tmp_path / "metrics.json"
    skip = ("--train-data-path", str(bad), "--bad-sample", "skip", "--metrics-json", str(metrics))
    found = observe(flags, *skip, *layout, ranks=ranks)
    torch.testing.assert_close(found[0]["losses"], left_out, rtol=2e-5, atol=0)
    # Once in each of the four epochs, on all ranks of the last stage of the replica.
    assert sum(len(each["untrained"]) for each in found) == 4 * ranks // 2
    assert json.loads(metrics.read_text())["bad_samples"] == {"pixels": 4}


def behind_board(rank: int, *, flags: list[str], store: str, board: int) -> None:
    with failure_board(lambda timeout: dist.FileStore(store, board)):
        run(flags)


@pytest.mark.slow
def test_a_truncated_image_is_one_error_when_fatal(flags, truncated, tmp_path):
    bad, _, number = truncated
    fatal = [*flags, "--train-data-path", str(bad), *TP2_PP2]
    with pytest.raises(RankError) as raised:
        run_ranks(
            behind_board, 4, flags=fatal, store=str(tmp_path / "store"), board=4, timeout=120.0
        )
    (image,) = bad.parent.glob("*-cut.png")
    message = rf"bad.jsonl:{number + 1}: image {image} is damaged"
    text = str(raised.value)
    assert len(raised.value.errors) == 4
    assert text.count(message) == 1, text
    assert "loongplug: error [rank 0]" in text
