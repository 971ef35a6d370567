"""Bad input ends every rank with the same sentence and a code, and never hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from digits.make import make_demo_data
from ranks import run_ranks

from loongplug.checkpoint.save_lock import LOCK_FILE
from loongplug.train import main

ROOT = Path(__file__).parent.parent
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


def write_rows(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def question(*content: dict) -> dict:
    return {
        "messages": [
            {"role": "user", "content": list(content)},
            {"role": "assistant", "content": "1"},
        ]
    }


def locked_folder(folder: Path) -> str:
    holder = {"host": "elsewhere", "process": 1, "born": "1", "since": "yesterday", "job": ""}
    folder.mkdir()
    (folder / LOCK_FILE).write_text(json.dumps(holder))
    return str(folder)


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
    lost = write_rows(
        tmp_path / "lost.jsonl",
        question({"type": "image", "image": "lost.png"}, {"type": "text", "text": "Read."}),
    )
    more = {
        "world size": TP2_PP2,
        "image file": ("--train-data-path", lost),
        "an earlier export": ("--save-hf", str(tmp_path)),  # which has files of another
        "another run": ("--save", locked_folder(tmp_path / "locked")),
    }[case]
    codes = run_ranks(exit_code, ranks, argv=flags(demo, *more), timeout=60.0)
    assert codes == [1] * ranks
    printed = capsys.readouterr().out
    for rank in range(ranks):
        said = printed.partition(f"loongplug: error [rank {rank}]: ")[2]
        assert sentence in said.partition("loongplug: error")[0], printed
    assert "Traceback" not in printed


def test_a_device_that_is_not_there_is_refused_in_one_sentence(demo):
    ended = subprocess.run(
        [sys.executable, "-m", "loongplug.train", *flags(demo, "--device", "cuda")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if "loongplug: error" in line]
    assert len(errors) == 1
    assert "device 'cuda' was asked for, but torch sees no usable CUDA GPU here" in errors[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_an_image_that_only_one_rank_decodes_ends_all_ranks(demo, tmp_path):
    """Its header is whole, so the text is made on every rank; the last stage never decodes it."""
    image = tmp_path / "cut.png"
    whole = next((demo / "images").glob("*-64x64.png")).read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    rows = write_rows(
        tmp_path / "cut.jsonl",
        question({"type": "image", "image": "cut.png"}, {"type": "text", "text": "Read."}),
    )
    ended = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "torchrun"), "--standalone"),
            *("--nproc-per-node=2", "loongplug/train.py"),
            *flags(demo, "--train-data-path", rows, "--pipeline-model-parallel-size=2"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith("loongplug: error")]
    assert len(lines) == 1, ended.stderr[-3000:]
    assert lines[0].startswith("loongplug: error [rank 0]: ")
    assert "cut.png" in lines[0]
