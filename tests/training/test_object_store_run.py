"""Training on data and images of an S3 server on this machine, through the real entry function."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from s3_server import S3

from loongplug.train import main


def _run(rank: int, *, argv: list[str]) -> None:
    main(argv)


@pytest.mark.slow
def test_data_and_images_come_from_s3(s3: S3, demo: Path, flags: list[str], tmp_path: Path) -> None:
    """Ranks and their background processes ask the store each for themselves."""
    s3.put_folder(demo / "images", prefix="demo/images")
    train = s3.put("demo/train.jsonl", demo / "train.jsonl")
    row = {"image": "gone.png", "conversations": [{"from": "human", "value": "<image>Read."}]}
    row["conversations"] += [{"from": "gpt", "value": "1"}]
    more = s3.put("demo/more.jsonl", f"{json.dumps(row)}\n".encode() * 16)
    metrics = tmp_path / "metrics.json"
    argv = [
        *flags,
        *("--train-data-path", train, more, "--num-workers", "1", "--bad-sample", "skip"),
        *("--metrics-json", str(metrics)),
    ]
    run_ranks(_run, 2, argv=argv, timeout=180.0)
    written = json.loads(metrics.read_text())
    assert written["iterations"] == 4
    assert written["bad_samples"]["media"] >= 1
    assert len(s3.fetched("demo/train.jsonl")) == 1  # for both ranks
    heads = [sent for _, path, sent in s3.asked if path.endswith(".png") and sent]
    assert len(heads) > 32
