"""Ranks that were started differently: all end with one sentence before they make groups."""

import json
import os
import shutil
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from digits.make import make_demo_data
from micro.random_folder import write_random_folder
from ranks import run_ranks
from small_checkpoints import write_checkpoint

from loongplug.convert.rank import convert
from loongplug.data import fingerprint
from loongplug.parallel import same_values
from loongplug.training import start_agreement
from loongplug.training.arguments import parse_arguments
from loongplug.training.run import run
from loongplug.training.start_agreement import MAY_DIFFER, start_values

# What one rank has that the others have not, and what all are told of it.
CASES = {
    "--lr 0.002": "  --lr: 0.001 on rank 0; 0.002 on rank 1",
    "--save {folder}/run": "  --save: nothing on rank 0; {folder}/run on rank 1",
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
    write_random_folder(made / "node0" / "weights", model_name="qwen3_vl_tiny")
    shutil.copytree(made / "node0", made / "node1")
    weights = made / "node1" / "weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    for node in ("node0", "node1"):
        shutil.copy(made / "train.jsonl", made / node)
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
    # A node with other weights, in files of the same name and size.
    os.environ["GROUP_RANK"] = str(rank)
    os.chdir(folder / f"node{rank}")
    differs = r"  --load-hf model.safetensors: (\d+ bytes, digest )\w+ on rank 0; \1"
    with pytest.raises(ValueError, match=differs):
        run([*flags_of(folder), "--load-hf", "weights"])
    with pytest.raises(ValueError, match=differs):
        convert(["--device", "cpu", "--load-hf", "weights", "--save", str(folder / "shared")])
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
    monkeypatch.setattr(start_agreement, "version", lambda package: "0.0.1")
    after = start_values(parsed("--load", str(tmp_path), "--save", str(tmp_path)))
    assert names(before, after) == [
        f"latest_checkpointed_iteration.txt in {tmp_path}",
        *("version of loongplug", "version of torch", "version of megatron-core"),
        *("version of transformers", "version of tokenizers", "version of pillow"),
    ]


def weights_of(**given: Path) -> dict[str, str]:
    folders = {"load": None, "load_hf": None, "load_lora": None, "ckpt_step": None} | given
    return dict(start_agreement._weights(Namespace(**folders)))


def names(before: dict[str, str], after: dict[str, str]) -> list[str]:
    lines = same_values.differences({0: before, 1: after})
    return [line.partition(":")[0] for line in lines]


def test_headers_and_blocks_of_weights_are_read_within_a_bound(monkeypatch, tmp_path):
    """A header counts as a whole, also where it is longer than a block."""
    file, read = tmp_path / "model.safetensors", []
    header = json.dumps({f"a.{number}": [number] for number in range(1000)}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(2**20)
    file.write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "cache.bin").write_text("of this node alone")
    monkeypatch.setattr(start_agreement, "WEIGHTS_BYTES", 2**17)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 2**12)
    before = weights_of(load_hf=tmp_path)
    assert before.keys() == {"--load-hf config.json", "--load-hf model.safetensors"}
    for place in (9_000, len(content) - 1):  # between two blocks, and in one
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert names(before, weights_of(load_hf=tmp_path)) == ["--load-hf model.safetensors"]
    file.write_bytes(content + b" ")
    (tmp_path / "model-2.safetensors").write_bytes(b"{")
    assert len(names(before, weights_of(load_lora=tmp_path, load_hf=tmp_path))) == 5

    opened = Path.open

    @contextmanager
    def counted(path: Path, mode: str):
        with opened(path, mode) as found:
            yield SimpleNamespace(
                seek=found.seek, read=lambda size: read.append(size) or found.read(size)
            )

    monkeypatch.setattr(Path, "open", counted)
    weights_of(load_hf=tmp_path)
    assert 2**15 < sum(read) <= 2**17


def test_a_checkpoint_goes_before_weights_of_a_folder(tmp_path):
    write_checkpoint(tmp_path, "iter_0000004")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    before = weights_of(load=tmp_path, load_hf=tmp_path)
    files = {file.name: file for file in (tmp_path / "iter_0000004").iterdir()}
    assert before.keys() == {f"--load {name}" for name in files}
    assert "--load .metadata" in before
    largest = max(files.values(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")
    assert names(before, weights_of(load=tmp_path)) == [f"--load {largest.name}"]


def test_one_rank_of_a_node_looks_at_the_weights(monkeypatch):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("GROUP_RANK", "0")
    looked = []
    monkeypatch.setattr(start_agreement, "_weights", lambda args: looked.append(args) or {"a": "1"})

    def rank(number: int) -> None:
        args = Namespace(rank=number, ranks=3, distributed_timeout_minutes=1)
        start_agreement.require_same_weights(args)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank, range(3)))
    assert len(looked) == 1


def test_keys_are_those_of_the_attempt_and_of_the_start(parsed, monkeypatch):
    """A process may start a second time, and torchrun keeps its store for another attempt."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    seen = []
    monkeypatch.setattr(
        start_agreement, "require_same_values", lambda values, **how: seen.append((values, how))
    )
    for _ in range(2):
        start_agreement.require_same_start(parsed("--distributed-timeout-minutes", "7"))
    for (values, how), start in zip(seen, (1, 2), strict=True):
        how["store"].set("mine", str(start))
        assert agent.get(f"loongplug/start/2/{start}/mine") == str(start).encode()
        assert how["timeout"] == timedelta(minutes=7)
        assert (how["rank"], how["world_size"]) == (0, 2)
        assert values["--lr"] == "0.001"


def test_a_single_rank_and_ranks_without_torchrun_compare_nothing(parsed, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    start_agreement.require_same_start(parsed())
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    monkeypatch.setenv("WORLD_SIZE", "1")
    start_agreement.require_same_start(parsed())
