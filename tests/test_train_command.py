"""The commands as a user types them: torchrun on the entry file, then eval and transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from loongplug.data.demo import make_demo_data

ROOT = Path(__file__).parent.parent


def command(program: str, *words: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / program), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def torchrun(*flags: str, ranks: int) -> subprocess.CompletedProcess[str]:
    launcher = ("--standalone", f"--nproc-per-node={ranks}")
    return command("torchrun", *launcher, "loongplug/train.py", *flags)


@pytest.mark.slow
def test_train_export_evaluate_and_answer(tmp_path):
    make_demo_data(tmp_path, train=32, test=8)
    ended = torchrun(
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(tmp_path / "processor"), "--seq-length", "48"),
        *("--train-data-path", str(tmp_path / "train.jsonl"), "--train-iters", "2"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3"),
        *("--tensor-model-parallel-size", "2", "--save", str(tmp_path / "run")),
        *("--save-hf", str(tmp_path / "hf"), "--metrics-json", str(tmp_path / "metrics.json")),
        ranks=2,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "iteration 2/2 | loss" in ended.stdout
    assert "consumed samples" not in ended.stdout  # Megatron's lines are in the run's logs

    ended = command(
        *("loongplug", "eval", "--model", str(tmp_path / "hf"), "--device", "cpu"),
        *("--data", str(tmp_path / "test.jsonl"), "--json", str(tmp_path / "metrics.json")),
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert 0.0 <= metrics["exact_match"] <= 1.0
    assert {"loss_first", "loss_last", "tokens_per_second", "train_seconds"} <= metrics.keys()

    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf")
    image = Image.open(next((tmp_path / "images").glob("*-32x32.png")))
    question = [{"type": "image", "image": image}, {"type": "text", "text": "Read the digits."}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    assert torch.equal(answer[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


@pytest.mark.slow
def test_a_misspelt_flag_is_one_sentence_on_every_rank_and_a_code(tmp_path):
    ended = torchrun("--model-name", "qwen3_vl_tiny", "--tensor-modle-parallel-size=2", ranks=2)
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith("loongplug: error")]
    assert [line[: len("loongplug: error [rank 0]")] for line in sorted(lines)] == [
        "loongplug: error [rank 0]",
        "loongplug: error [rank 1]",
    ]
    assert all(line.endswith("the closest is --tensor-model-parallel-size") for line in lines)
    assert "loongplug/training" not in ended.stderr  # no traceback of ours
