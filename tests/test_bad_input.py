"""Bad input ends every rank with the same sentence and a code, and never hangs."""

import json
from pathlib import Path

import pytest
from digits.make import make_demo_data
from ranks import run_ranks

from loongplug.checkpoint.save_lock import LOCK_FILE
from loongplug.train import main

TP2_PP2 = ("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder, train=16, test=4)
    return folder


def flags(demo: Path, *more: str) -> list[str]:
    return [
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(demo / "processor"), "--seq-length", "48"),
        *("--train-data-path", str(demo / "train.jsonl"), "--train-iters", "2", "--lr", "1e-3"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", *more),
    ]


def exit_code(rank: int, *, argv: list[str]) -> int | str | None:
    try:
        main(argv)
    except SystemExit as ended:
        return ended.code
    return "ran to the end"


@pytest.mark.parametrize(
    ("case", "ranks", "sentence"),
    [
        ("world size", 3, "3 ranks do not divide by tp 2 x pp 2"),
        ("image file", 2, "no image file at"),
        ("an earlier export", 2, "not wholly an earlier export of LoongPlug"),
        ("another run", 2, "in use by another run (process 1 on elsewhere since yesterday)"),
    ],
)
def test_every_rank_ends_with_one_sentence(demo, tmp_path, capsys, case, ranks, sentence):
    lost = {"role": "user", "content": [{"type": "image", "image": "lost.png"}]}
    row = {"messages": [lost, {"role": "assistant", "content": "1"}]}
    (tmp_path / "lost.jsonl").write_text(json.dumps(row) + "\n")
    holder = {"host": "elsewhere", "process": 1, "born": "1", "since": "yesterday", "job": ""}
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / LOCK_FILE).write_text(json.dumps(holder))
    more = {
        "world size": TP2_PP2,
        "image file": ("--train-data-path", str(tmp_path / "lost.jsonl")),
        "an earlier export": ("--save-hf", str(tmp_path)),  # which has files of another
        "another run": ("--save", str(tmp_path / "locked")),
    }[case]
    codes = run_ranks(exit_code, ranks, argv=flags(demo, *more), timeout=60.0)
    assert codes == [1] * ranks
    printed = capsys.readouterr().out
    for rank in range(ranks):
        said = printed.partition(f"loongplug: error [rank {rank}]: ")[2]
        assert sentence in said.partition("loongplug: error")[0], printed
    assert "Traceback" not in printed
