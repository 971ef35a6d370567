"""What the tests of launch scripts share."""

from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_job import losses


@pytest.fixture(scope="session")
def environment(
    demo: Path, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What ``sft.sh`` takes, for a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    first = [*flags, "--lr", "0", "--train-iters", "1", "--save-hf", str(folder)]
    run_ranks(losses, 1, flags=first, timeout=200.0)
    sizes = {"TP": "1", "GPUS_PER_NODE": "1", "SEQ_LENGTH": "80", "MICRO_BATCH_SIZE": "2"}
    sizes["PACKING"] = "false"
    steps = {"GLOBAL_BATCH_SIZE": "8", "FREEZE_ENCODER": "false"}
    return {"MODEL_DIR": str(folder), "TRAIN_DATA": str(demo / "train.jsonl"), **sizes, **steps}
