"""Ranks that were started differently: all end with one sentence before they make groups."""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks

from loongplug.data.demo import make_demo_data
from loongplug.parallel import same_values
from loongplug.training import same_start
from loongplug.training.arguments import parse_arguments
from loongplug.training.run import run
from loongplug.training.same_start import MAY_DIFFER, start_values

# What one rank has that the others have not, and what all are told of it.
CASES = {
    "--lr 0.002": "  --lr: 0.001 on rank 0; 0.002 on rank 1",
    "--seed 7": "  --seed: 1234 on rank 0; 7 on rank 1",
    "--micro-batch-size 1": "  --micro-batch-size: 2 on rank 0; 1 on rank 1",
    "--train-iters 3": "  --train-iters: 2 on rank 0; 3 on rank 1",
    "--save {folder}/run": "  --save: nothing on rank 0; {folder}/run on rank 1",
    "--tensor-model-parallel-size 2": ("  --tensor-model-parallel-size: 1 on rank 0; 2 on rank 1"),
    "model.image_encoder.freeze=True": (
        "  model.image_encoder.freeze: False on rank 0; True on rank 1"
    ),
    "model.foundation.num_layers=6": "  model.foundation.num_layers: 4 on rank 0; 6 on rank 1",
    "--train-data-path test.jsonl": (
        "  --train-data-path: train.jsonl on rank 0; test.jsonl on rank 1"
    ),
}


def flags_of(folder: Path) -> list[str]:
    return [
        *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(folder / "processor"), "--seq-length", "48"),
        *("--train-data-path", "train.jsonl", "--train-iters", "2"),
        *("--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("start")
    make_demo_data(made, train=16, test=4)
    (made / "elsewhere").mkdir()
    shutil.copy(made / "test.jsonl", made / "elsewhere" / "train.jsonl")
    return made


def told(rank: int, *, folder: Path, port: int) -> list[str]:
    """What a rank is told in each case, as torchrun has started it; it never makes a group."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    found = []
    for case in CASES:
        odd = case.format(folder=folder).split() if rank == 1 else []
        with pytest.raises(ValueError, match="ranks were started differently") as raised:
            run([*flags_of(folder), *odd])
        found.append(str(raised.value))
    if rank == 1:  # which has another file of the same name
        os.chdir(folder / "elsewhere")
    with pytest.raises(ValueError, match=r"  data training rows file 1 digest: \w+ on rank 0; "):
        run([*flags_of(folder), "--save", str(folder / "shared")])
    assert not dist.is_initialized()
    # Nothing has been noted there, although the lock was taken before data were compared.
    assert not (folder / "run").exists()
    assert not [*(folder / "shared").glob("loongplug_*")]
    return found


@pytest.mark.slow
def test_a_rank_that_was_started_differently_ends_all_of_them(folder):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, *others = run_ranks(told, 2, folder=folder, port=agent.port, timeout=120.0)
    assert all(other == first for other in others)
    for said, expected in zip(first, CASES.values(), strict=True):
        assert expected.format(folder=folder) in said


@pytest.fixture
def parsed(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(folder)

    def parse(*more: str, rank: int = 0):
        with mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank)):
            return parse_arguments([*flags_of(folder), *more])

    return parse


@pytest.mark.quick
def test_what_may_differ_does_and_nothing_else(parsed):
    zero, one = (start_values(parsed(rank=rank)) for rank in (0, 1))
    assert zero == one
    assert parsed(rank=0).args.local_rank != parsed(rank=1).args.local_rank
    assert all(MAY_DIFFER.values())


def test_versions_and_the_checkpoint_to_load_are_compared(parsed, monkeypatch, tmp_path):
    before = start_values(parsed("--load", str(tmp_path), "--save", str(tmp_path)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    monkeypatch.setattr(same_start, "version", lambda package: "0.0.1")
    after = start_values(parsed("--load", str(tmp_path), "--save", str(tmp_path)))
    names = [line.partition(":")[0] for line in same_values.differences({0: before, 1: after})]
    assert names == [
        f"latest_checkpointed_iteration.txt in {tmp_path}",
        *("version of loongplug", "version of torch", "version of megatron-core"),
        *("version of transformers", "version of tokenizers", "version of pillow"),
    ]


def test_keys_are_those_of_the_attempt_and_of_the_start(parsed, monkeypatch):
    """A process may start a second time, and torchrun keeps its store for another attempt."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    seen = []
    monkeypatch.setattr(
        same_start, "require_same_values", lambda values, **how: seen.append((values, how))
    )
    for _ in range(2):
        same_start.require_same_start(parsed("--distributed-timeout-minutes", "7"))
    for (values, how), start in zip(seen, (1, 2), strict=True):
        how["store"].set("mine", str(start))
        assert agent.get(f"loongplug/start/2/{start}/mine") == str(start).encode()
        assert how["timeout"] == timedelta(minutes=7)
        assert (how["rank"], how["world_size"]) == (0, 2)
        assert values["--lr"] == "0.001"


def test_a_single_rank_and_ranks_without_torchrun_compare_nothing(parsed, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    same_start.require_same_start(parsed())
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    monkeypatch.setenv("WORLD_SIZE", "1")
    same_start.require_same_start(parsed())
