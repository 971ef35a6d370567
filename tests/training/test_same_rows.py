"""Ranks that read a row differently: a sentence with row and ranks, before any waits in vain."""

import json
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from layout_flags import TP2
from PIL import Image
from ranks import RankError, run_ranks

from loongplug.data.packing import PackingState
from loongplug.data.sample import BadSample, MediumExtent, RowExtent, Sample
from loongplug.data.sample_order import ResumePoint
from loongplug.parallel.failure import SharedFaultError
from loongplug.training import delivery
from loongplug.training.delivery import SameRows
from loongplug.training.run import run


def of_grids(*grids: tuple[int, int, int]) -> RowExtent:
    return RowExtent(media=tuple(MediumExtent("image", grid) for grid in grids))


SAMPLE = replace(
    Sample.blank(), input_ids=np.arange(7), extent=of_grids((1, 4, 6)), where="rows.jsonl:3"
)
MISSING = Sample.blank(BadSample("media", "rows.jsonl:3: a.png is not there"))


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def ranks(store: dist.Store) -> list[SameRows]:
    how = {"ranks": 2, "distributed_timeout_minutes": 1}
    return [SameRows(Namespace(rank=rank, **how), store=store) for rank in (0, 1)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(SAMPLE, input_ids=np.arange(8)), "rows.jsonl:3: 8 tokens (digest "),
        (replace(SAMPLE, input_ids=np.arange(1, 8)), "rows.jsonl:3: 7 tokens (digest "),
        (replace(SAMPLE, extent=of_grids((1, 6, 4))), "rows.jsonl:3: 7 tokens (digest "),
        (MISSING, "rows.jsonl:3: a.png is not there: left out (media) on rank 1, 7 tokens"),
    ],
)
def test_a_row_that_differs_is_named_with_two_ranks(
    other: Sample, said: str, ranks: list[SameRows]
) -> None:
    first, second = ranks
    for compare in (first, second):
        compare("training", 0, 0, [SAMPLE, SAMPLE], None)
    first("training", 0, 1, [SAMPLE, SAMPLE], None)  # who comes first goes on, and is waited with
    second("training", 1, 1, [SAMPLE, other], None)  # of another replica, with other rows
    same = replace(SAMPLE, where="rows.jsonl:2")
    with pytest.raises(SharedFaultError) as raised:
        second("training", 0, 1, [same, other], None)
    assert said in str(raised.value)
    assert "on rank 1, " in str(raised.value)
    assert str(raised.value).endswith(
        "on rank 0. Ranks have to read the same of a row: give all of them the same media files."
    )


@pytest.mark.quick
def test_what_is_kept_and_said_is_short(store: dist.Store, ranks: list[SameRows]) -> None:
    where = f"{'folder/' * 99}rows.jsonl:12345678"
    video = replace(SAMPLE, extent=of_grids(*[(1, 4, 6)] * 500), where=where)
    first, second = ranks
    first("training", 0, 0, [video] * 100, None)
    assert len(store.get("training/0/0")) < 2000
    missing = Sample.blank(BadSample("media", f"{where}: {'no file ' * 99}"))
    for other in (replace(video, extent=of_grids(*[(1, 4, 6)] * 499, (1, 6, 4))), missing):
        with pytest.raises(SharedFaultError) as raised:
            second("training", 0, 0, [*[video] * 99, other], None)
        assert len(str(raised.value)) <= 500
        assert "7 tokens" in str(raised.value)
    before = ResumePoint(4, PackingState(read=9, held=((8, 17),)))
    first("training", 0, 1, [video], before)
    with pytest.raises(SharedFaultError, match=r"rows\.jsonl:12345678: in a pack") as raised:
        second("training", 1, 1, [video], ResumePoint(4, PackingState(read=9, held=())))
    assert len(str(raised.value)) <= 500


@pytest.mark.quick
def test_packs_of_all_replicas_are_planned_alike(ranks: list[SameRows]) -> None:
    first, second = ranks
    before = ResumePoint(4, PackingState(read=9, held=((8, 17),)))
    first("training", 0, 0, [SAMPLE], before)
    second("training", 1, 0, [SAMPLE, SAMPLE], before)
    first("training", 0, 1, [SAMPLE], before)
    other = ResumePoint(4, PackingState(read=9, held=((8, 18),)))
    with pytest.raises(
        ValueError, match=r"rows.jsonl:3: in a pack behind .* on rank 1, in a pack b"
    ):
        second("training", 1, 1, [SAMPLE], other)
    first("training", 0, 2, [SAMPLE], before)
    with pytest.raises(ValueError, match=r"7 tokens .* on rank 1, nothing on rank 0"):
        second("training", 0, 2, [SAMPLE, SAMPLE], before)


@pytest.mark.quick
def test_the_store_keeps_what_others_may_still_ask_for_and_no_more(
    store: dist.Store, ranks: list[SameRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_COMPARED", 8)
    for index in range(100):
        for compare in ranks:
            compare("training", 0, index, [SAMPLE], None)
    assert store.num_keys() == 8


@pytest.mark.quick
def test_a_store_that_is_gone_ends_no_run() -> None:
    class Gone:
        calls = 0

        def compare_set(self, *values: str) -> bytes:
            self.calls += 1
            raise dist.DistNetworkError("gone")

    gone = Gone()
    compare = SameRows(Namespace(rank=0), store=gone)
    for index in range(2):
        compare("training", 0, index, [SAMPLE], None)
    assert gone.calls == 1


def trained(rank: int, *, flags: list[str], roots: list[Path], port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run([*flags, "--media-root", str(roots[rank])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "smaller"),
    [
        pytest.param(("model.image_encoder.rank_offset=1",), False, id="apart-missing"),
        pytest.param(TP2, True, id="tensor-smaller"),
    ],
)
def test_a_file_that_one_rank_has_otherwise_ends_a_run(
    flags: list[str], demo: Path, tmp_path: Path, layout: tuple[str, ...], smaller: bool
) -> None:
    rows = [row for row in (demo / "train.jsonl").read_text().splitlines() if '"image"' in row][:8]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows) + "\n")
    parts = json.loads(rows[5])["messages"][0]["content"]
    image = Path(next(part["image"] for part in parts if part["type"] == "image"))
    other = tmp_path / image.parent
    other.mkdir(parents=True)
    for file in (demo / image.parent).iterdir():
        if file.name != image.name:
            (other / file.name).symlink_to(file)
    if smaller:
        found = Image.open(demo / image)
        found.resize((found.width, found.height // 2)).save(other / image.name)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RankError, match=r"rows.jsonl:6: .*on rank [01], .*on rank [01]\. Ranks"):
        run_ranks(
            trained,
            2,
            flags=[
                *(*flags, *layout, "--train-data-path", str(data)),
                *("--train-iters", "1", "--bad-sample", "skip"),
            ],
            roots=[demo, tmp_path],
            port=agent.port,
            timeout=120.0,
        )


@pytest.mark.quick
def test_ranks_go_by_what_all_of_them_have(ranks: list[SameRows]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for has in ((True, False), (True, True), (False, False)):
            asked = [pool.submit(one.all_have, own) for one, own in zip(ranks, has, strict=True)]
            assert [each.result(60) for each in asked] == [all(has)] * 2
