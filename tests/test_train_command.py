"""The commands as a user types them: torchrun on the entry file, then eval and transformers."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from digits.make import make_demo_data
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from loongplug import train

ROOT = Path(__file__).parent.parent


TRAINING = (
    *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
    *("--seq-length", "48", "--global-batch-size", "4", "--lr", "1e-3", "--train-iters", "2"),
)


def run(program: str, *words: str, **told: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / program), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **told},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_train_export_evaluate_and_answer(tmp_path):
    make_demo_data(tmp_path, train=32, test=8)
    ended = run(
        *("loongplug", "train", "--ranks", "2", *TRAINING, "--micro-batch-size", "2"),
        *("--tokenizer-model", str(tmp_path / "processor")),
        *("--train-data-path", str(tmp_path / "train.jsonl")),
        *("--tensor-model-parallel-size", "2", "--save", str(tmp_path / "run")),
        *("--save-hf", str(tmp_path / "hf"), "--metrics-json", str(tmp_path / "metrics.json")),
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "iteration 2/2 | loss" in ended.stdout
    assert "consumed samples" not in ended.stdout  # Megatron's lines are in the run's logs

    ended = run(
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
def test_without_torchrun_it_is_a_single_rank_and_ctrl_c_ends_it_in_one_line(tmp_path):
    """What a terminal shows of a run that saves; all else is in a log that it names."""
    make_demo_data(tmp_path, train=32, test=8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    saved = tmp_path / "run"
    terminal, end = pty.openpty()
    started = subprocess.Popen(
        [
            *(sys.executable, "loongplug/train.py", *TRAINING, "--num-workers", "1"),
            *("--tokenizer-model", str(tmp_path / "processor"), "--micro-batch-size", "2"),
            *("--train-data-path", str(tmp_path / "train.jsonl"), "--train-iters", "100000"),
            *("--log-interval", "20", "--save", str(saved), "--save-interval", "20"),
        ],
        cwd=ROOT,
        env=environment,
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches its loading process too
    )
    os.close(end)
    try:
        shown = "".join(_until(terminal, r"iteration 20/.* [2-9][1-9]/100000"))
        os.killpg(started.pid, signal.SIGINT)
        shown += "".join(_until(terminal, None))
        _, stderr = started.communicate(timeout=120)
    finally:
        started.kill()
        os.close(terminal)
    assert stderr == "loongplug: interrupted\n"
    assert started.returncode == 130
    assert f"Megatron's of each rank in {saved}/logs" in shown
    assert f"checkpoints to {saved} every 20 steps" in shown
    log = (saved / "logs" / "rank_0.log").read_text()
    # What Megatron says while the bar is there, too.
    for words in (
        *("consumed samples", "Theoretical memory footprints", "(after 20 iterations)"),
        *("(before save_checkpoint for iteration 20)", "successfully saved checkpoint"),
    ):
        assert words in log
        assert words not in shown


def _until(terminal: int, pattern: str | None) -> Iterator[str]:
    """What a program shows there, until it is as the pattern says or the program has ended."""
    shown = ""
    until = time.monotonic() + 200
    while pattern is None or not re.search(pattern, shown, re.DOTALL):
        assert time.monotonic() < until, shown
        ready, _, _ = select.select([terminal], [], [], 1.0)
        try:
            part = os.read(terminal, 2**16).decode(errors="replace") if ready else ""
        except OSError:  # nobody has its other end any more
            return
        shown += part
        yield part


@pytest.mark.slow
@pytest.mark.parametrize(("command", "answer"), [("estimate", "stage 1"), ("partition", "flags: ")])
def test_commands_that_plan_are_as_clean(command, answer):
    """Nothing that libraries tell comes between a user and the answer."""
    ended = run(
        *("loongplug", command, "--ranks", "2", "--visual-tokens", "4"),
        *("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", *TRAINING),
        CUDA_HOME=str(ROOT),  # which torch would note
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert answer in ended.stdout


@pytest.mark.quick
def test_what_libraries_tell_those_who_write_code_is_left_out():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train.quiet()
        for kind, module in (
            (FutureWarning, "torch.distributed.distributed_c10d"),
            (DeprecationWarning, "megatron.core.utils"),
            (UserWarning, "megatron.core.optimizer"),
            (UserWarning, "torch.distributed.checkpoint.utils"),
            (UserWarning, "loongplug.data.media_files"),
            (FutureWarning, "a_package_of_the_user"),
        ):
            warnings.warn_explicit("old", kind, "file.py", 1, module=module)
    assert [each.category for each in caught] == [UserWarning, FutureWarning]
