"""``--epochs``: how many iterations it stands for, and what is refused."""

from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
from command_lines import command_line
from surveyed import settings_of

from loongplug.data.check import index
from loongplug.data.data_options import RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.processor_folder import load_processor
from loongplug.data.sample_order import Packing, PackStream, SampleOrder
from loongplug.training.arguments import parse_arguments
from loongplug.training.rows import training_rows, validation_rows

pytestmark = pytest.mark.quick

ROWS = 30


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    """Flags of a run on 30 rows, without its length."""
    made = command_line(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n" * ROWS)
    at = made.index("--train-iters")
    return [*made[:at], *made[at + 2 :]]


def parsed(line: list[str], *more: str) -> Namespace:
    return parse_arguments([*line, *more]).args


def test_the_last_step_is_filled_up_so_that_no_row_is_left_out(line: list[str]) -> None:
    for epochs, expected in (("1", 4), ("2", 8), ("4", 15)):  # of 30 rows in steps of 8
        args = parsed(line, "--epochs", epochs)
        assert (args.train_iters, args.epochs) == (expected, None)
    args = parsed(line, "--epochs", "2", "--save", "/run")
    assert args.save_interval == 8


def test_an_epoch_is_one_of_the_blend(line: list[str], tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("{}\n" * 3)
    files = ("0.5", str(tmp_path / "train.jsonl"), "0.5", str(tmp_path / "few.jsonl"))
    blend = ("--train-data-path", *files)
    assert parsed(line, "--epochs", "2", *blend).train_iters == 2 * 60 // 8


def test_rows_for_validation_alone_are_none_of_the_epoch(line: list[str]) -> None:
    flags = ("--epochs", "1", "--valid-share", "0.4")
    args = parsed(line, *flags)
    train, valid = training_rows(args), validation_rows(args)
    assert valid is not None
    places = [rows.where(index) for rows in (train, valid) for index in range(len(rows))]
    assert len(set(places)) == len(places) == ROWS
    assert args.train_iters == -(-len(train) // 8) < 4
    assert validation_rows(parsed(line, *flags, "--eval-iters", "0")) is None


def test_sizes_that_grow_count_as_they_are(line: list[str]) -> None:
    args = parsed(line, "--epochs", "1", "--rampup-batch-size", "4", "2", "20")
    assert args.train_iters == 6  # of 4, 4, 4, 6, 6 and 8


def test_rules_that_go_by_the_iterations_see_them(line: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--lr-warmup-iters 4 does not end before iteration 4"):
        parsed(line, "--epochs", "1", "--lr-warmup-iters", "4")
    with pytest.raises(ValueError, match=r"--epochs 1 with --train-iters 9: both say when"):
        parsed(line, "--epochs", "1", "--train-iters", "9")
    with pytest.raises(ValueError, match=r"No data file at gone\.jsonl") as raised:
        parsed(line, "--epochs", "1", "--train-data-path", "gone.jsonl")
    assert len(str(raised.value).splitlines()) == 1  # it is not opened, too


def test_packs_are_counted_by_the_index(flags: list[str], demo: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text((demo / "train.jsonl").read_text())
    packing = ("--packing", "--packing-look-ahead", "16", "--micro-batch-size", "1")
    run = (*packing, "--train-data-path", str(data), "--media-root", str(demo))
    at = flags.index("--train-iters")
    line = [*flags[:at], *flags[at + 2 :], *run, "--global-batch-size", "4", "--epochs", "2"]
    with pytest.raises(ValueError, match="--epochs 2 with --packing counts packs") as raised:
        parsed(line)
    assert f"`loongplug data index {data} --tokenizer-model " in str(raised.value)
    folder, access = demo / "processor", RowAccess(media_root=demo)
    index([str(data)], settings_of(folder, access=access), processes=1)
    args = parsed(line)
    dataset = ChatDataset(
        training_rows(args),
        processor=load_processor(folder),
        seq_length=80,
        training_phase="sft",
    )
    packing = Packing(seq_length=80, look_ahead=16)
    order = SampleOrder(64, seed=args.seed)
    packs = PackStream(lambda at: len(dataset[order.index(at)]), packing=packing)
    seen: Counter[str] = Counter()
    count = 0
    while len(seen) < 64 or min(seen.values()) < 2:
        seen.update(map(str, order.indices(packs.next())))
        count += 1
    assert args.train_iters == -(-count // 4)
