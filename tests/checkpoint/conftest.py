"""Small demo data and flags for runs that save and load checkpoints."""

import pytest
from digits.make import make_demo_data


@pytest.fixture(scope="session")
def run_flags(tmp_path_factory):
    """Flags of a run of two short steps; later flags win over earlier ones."""
    demo = tmp_path_factory.mktemp("demo")
    make_demo_data(demo, train=32, test=4)
    return [
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(demo / "processor")),
        *("--train-data-path", str(demo / "train.jsonl")),
        *("--seq-length", "80", "--micro-batch-size", "1", "--global-batch-size", "4"),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--train-iters", "2"),
        *("--log-interval", "1", "--eval-iters", "0"),  # nothing is evaluated, files or not
        *("--valid-data-path", str(demo / "test.jsonl")),
    ]
