"""Training on a blend of files with a media root, through the real entry function."""

import json
import shutil
from pathlib import Path

import pytest
from ranks import run_ranks

from loongplug.data.blend import open_rows
from loongplug.train import main


def _run(rank: int, *, argv: list[str]) -> None:
    main(argv)


@pytest.mark.slow
def test_a_blend_with_a_media_root_trains(
    demo: Path, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The files stand elsewhere, so that only the media root leads to the images.

    One row names an image outside of it, which is left out: media are confined. Some of the rows
    are for validation alone.
    """
    shutil.copy(demo / "train.jsonl", tmp_path / "a.jsonl")
    turns = [{"from": "human", "value": "Read the digits."}, {"from": "gpt", "value": "31"}]
    shutil.copy(next((demo / "images").glob("*.png")), tmp_path / "outside.png")
    outside = [{"from": "human", "value": "<image>Read the digits."}, turns[1]]
    rows = (
        {"conversations": turns},
        {"conversations": outside, "image": str(tmp_path / "outside.png")},
    )
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    blend = ["3", str(tmp_path / "a.jsonl"), "1", str(tmp_path / "b.jsonl")]
    assert len(open_rows(blend, flag="--train-data-path", seed=1)) == 64 + 21
    metrics = tmp_path / "metrics.json"
    more = [
        *("--train-data-path", *blend, "--media-root", str(demo)),
        *("--confine-media", "--bad-sample", "skip"),
        *("--valid-share", "0.2", "--eval-interval", "2"),
        *("--metrics-json", str(metrics)),
    ]
    run_ranks(_run, 2, argv=[*flags, *more], timeout=120.0)
    written = json.loads(metrics.read_text())
    assert written["iterations"] == 4
    said = capfd.readouterr().out
    assert "\n6 of 66 rows of the training data are for validation alone: --valid-share" in said
    assert "\nvalidation  every 2 steps: 6 of 6 rows, each once, in " in said
    assert said.count("| validation loss ") == 2
    assert written["bad_samples"]["media"] >= 1
