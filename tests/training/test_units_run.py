"""Who decodes what in whole runs, and bad samples that all ranks leave out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_images import cut
from layout_flags import TP2_PP2, VIRTUAL
from PIL import Image
from ranks import RankError, run_ranks

from loongplug.data import media_kinds
from loongplug.data.loader import MicrobatchLoader
from loongplug.parallel.failure import failure_board
from loongplug.training.run import run


@pytest.fixture(scope="module")
def flags(flags, weights):
    """With weights, so that runs in several layouts can be compared."""
    return [*flags, "--load-hf", weights]


def observed(rank: int, *, flags: list[str]) -> dict[str, Any]:
    """A run's losses, and what this rank decoded, by its counter and by calls in its process."""
    loaders: list[MicrobatchLoader] = []
    calls = 0
    decode, original = media_kinds.decode_image, MicrobatchLoader.__next__

    def counting(*args: Any, **kwargs: Any) -> Image.Image:
        nonlocal calls
        calls += 1
        return decode(*args, **kwargs)

    def next_microbatch(self: MicrobatchLoader) -> Any:
        if self not in loaders:
            loaders.append(self)
        return original(self)

    media_kinds.decode_image, MicrobatchLoader.__next__ = counting, next_microbatch
    losses = [step.loss for step in run(flags)]
    counted = sum(each.source.decoded for each in loaders)
    return {"losses": losses, "decoded": counted, "calls": calls}


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


def behind_board(rank: int, *, flags: list[str], store: str, board: int) -> None:
    with failure_board(lambda timeout: dist.FileStore(store, board)):
        run(flags)


@pytest.mark.slow
def test_a_truncated_image_is_one_error_when_fatal(flags, demo, tmp_path):
    """Only who decodes it sees that it ends too early."""
    lines = (demo / "train.jsonl").read_text().splitlines()[:8]
    number = next(i for i, line in enumerate(lines) if '"image"' in line)
    lines[number] = cut(lines[number], source=demo, folder=tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(lines) + "\n")
    fatal = [*flags, "--train-data-path", str(bad), "--media-root", str(demo), *TP2_PP2]
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
