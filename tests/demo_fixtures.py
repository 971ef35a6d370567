"""Small demo data and flags for training runs in tests."""

from pathlib import Path

import pytest
from digits.make import make_demo_data


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """A folder with 64 training and 16 test samples, and the processor."""
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder, train=64, test=16)
    return folder


@pytest.fixture(scope="session")
def flags(demo):
    """Flags of a short run; later flags win over earlier ones."""
    return flags_of(demo)


def flags_of(demo: Path) -> list[str]:
    """Those of :func:`flags`, also where a module has other ones."""
    return [
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(demo / "processor")),
        *("--train-data-path", str(demo / "train.jsonl")),
        *("--seq-length", "80", "--micro-batch-size", "2", "--global-batch-size", "8"),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--train-iters", "4"),
        *("--adam-eps", "1e-5"),  # far above rounding, which else moves a weight by the whole rate
        *("--log-interval", "1"),
    ]
