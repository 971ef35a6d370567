"""``loongplug data check``: every fault that training would meet, with file and line."""

import dataclasses
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data import survey_settings
from loongplug.data.check import fill_words, length_table
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.workers import map_rows

SEQ_LENGTH = 40


@dataclasses.dataclass(frozen=True)
class Fault:
    line: int
    kind: str
    message: str


@pytest.fixture
def bad_file(tmp_path, write_image, row, monkeypatch) -> tuple[Path, list[Fault]]:
    """Twelve kinds of rows that cannot be used, each behind a good one, and what is wrong."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    good = write_image("good.png", height=32, width=32)
    cut = tmp_path / write_image("cut.png", height=96, width=96)
    cut.write_bytes(cut.read_bytes()[:5000])
    write_image("bomb.png", height=400, width=400)
    write_image("thin.png", height=2, width=500)
    (tmp_path / "text.png").write_text("no image")
    turns = [{"from": "human", "value": "<image>\nRead"}, {"from": "gpt", "value": "1"}]
    cases: list[tuple[Any, list[tuple[str, str]]]] = [
        (row("Read", "1", images=("cut.png",)), [("pixels", r"cut\.png is damaged")]),
        (row("Read", "1", images=("gone.png",)), [("media", r"no image file at .*gone\.png: rel")]),
        (row("Read", "1", images=("text.png",)), [("media", r"text\.png is not an image")]),
        (row("Read", "1", images=("bomb.png",)), [("media", r"bomb\.png has too many pixels")]),
        (row("Read", "1", images=("thin.png",)), [("media", "aspect ratio")]),
        (
            row("Read", "1", images=("gone.png", good, "cut.png", "text.png")),
            [("media", r"gone\.png"), ("pixels", r"cut\.png"), ("media", r"text\.png")],
        ),
        (row("Read", "1" * 60), [("length", r"has 71 tokens, but --seq-length is 40")]),
        (b'{"text": "a", "text": "b"}', [("row", 'the key "text" twice')]),
        ({"conversations": turns}, [("row", "1 <image> markers in the text for 0 images")]),
        (b'{"messages": "\xff\xfe"}', [("row", "not JSON .*utf-8")]),
        ({"text": "No roles."}, [("text", "plain text has no answers")]),
        ({"text": "\ud800 hi"}, [("row", "lone surrogate")]),
        (row("Read", "1", images=("a\0b.png",)), [("media", "cannot be opened: embedded null")]),
        (row("Read", "1", images=(f"{'a' * 300}.png",)), [("media", "cannot be opened")]),
        ("3", [("row", "a JSON int where an object was expected")]),
    ]
    path, faults = tmp_path / "rows.jsonl", []
    with path.open("wb") as file:
        for number, (case, expected) in enumerate(cases, start=1):
            file.write(json.dumps(row("Read", "1", images=(good,))).encode() + b"\n")
            text = json.dumps(case) if isinstance(case, dict) else case
            file.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
            faults += [Fault(2 * number, kind, message) for kind, message in expected]
    return path, faults


def run_check(*arguments: str | Path) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(app, ["data", "check", *(str(a) for a in arguments)])
    return result.exit_code, result.stdout.splitlines(), result.stderr


@pytest.mark.quick
@pytest.mark.parametrize("processes", [1, 3])
def test_the_command_prints_every_fault_in_order_and_ends_with_1(
    processor_folder, bad_file, tmp_path, processes
):
    path, faults = bad_file
    second = tmp_path / "more.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    second.write_bytes(lines[0] * 99 + b"\n{}\n")
    options = ("--tokenizer-model", processor_folder, "--seq-length", SEQ_LENGTH)
    code, printed, summary = run_check(
        "0.3", path, "0.7", second, *options, "--processes", processes
    )
    assert code == 1
    said = [rf"{path}:{fault.line}: .*{fault.message}" for fault in faults]
    for line, expected in zip(printed, [*said, f"{second}:101: "], strict=True):
        assert re.match(expected, line)
    assert f"{len(lines) + 100} rows in" in summary
    kinds = Counter(fault.kind for fault in faults) + Counter(["row"])
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    assert f"{len(lines) // 2 + 1} cannot be used ({counts})." in summary


def test_five_rows_of_each_fault_are_printed_and_the_others_counted(
    processor_folder, write_rows, row
):
    """By data check and data index; what differs from row to row makes no other fault."""
    gone = [row("Read", "1", images=(f"{'abcdefgh'[i]}.png",)) for i in range(8)]
    scored = [row("Read", "1") for _ in range(7)]
    for number, each in enumerate(scored):
        each["messages"][number % 2]["score"] = number
    path = write_rows(*gone, *scored, row("Read", ""))
    options = ("--tokenizer-model", processor_folder, "--processes", 1)
    for command in (("check", "--seq-length", 40), ("index",)):
        result = CliRunner().invoke(app, ["data", *map(str, (*command, path, *options))])
        *places, images, keys = [line.split(": ")[0] for line in result.stdout.splitlines()]
        assert places == [f"{path}:{line}" for line in (1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 16)]
        assert (images, keys) == (f"3 more are like {path}:1", f"2 more are like {path}:9")
    assert "16 rows in" in result.stderr


def test_a_file_that_changes_ends_the_command(processor_folder, write_rows, row, monkeypatch):
    path = write_rows(*[row("a", "b")] * 100)

    def load(*arguments: Any, **options: Any) -> Processor:
        path.write_text("{}\n")  # the rows are open by then
        return load_processor(*arguments, **options)

    monkeypatch.setattr(survey_settings, "load_processor", load)
    options = ("--tokenizer-model", processor_folder, "--seq-length", SEQ_LENGTH)
    code, printed, errors = run_check(path, *options, "--processes", 2)
    assert (code, printed, errors.count("has changed since")) == (1, [], 1)
    assert "Traceback" not in errors


def test_limits_and_special_tokens_in_text(processor_folder, write_rows, row):
    path = write_rows(row("Read <|image_pad|>", "1"), row("Read", "x" * 2**20))
    options = ("--tokenizer-model", processor_folder, "--seq-length", 100, "--processes", 1)
    too_long = f"{path}:2: the sample has "
    for flags, starts in (
        ((), [too_long]),
        (("--max-row-mib", 1), [f"{path}:2: the row has 1.0 MiB, but --max-row-mib is 1"]),
        (("--special-tokens-in-text",), [f"{path}:1: 1 image tokens in the text for 0", too_long]),
    ):
        code, printed, _ = run_check(path, *options, *flags)
        assert code == 1
        for line, start in zip(printed, starts, strict=True):
            assert line.startswith(start)


def test_the_command_ends_with_0_when_all_is_well(processor_folder, write_rows, row):
    path = write_rows(row("Read", "1"), {"text": "Read."})
    options = ("--tokenizer-model", processor_folder, "--seq-length", 40)
    code, printed, summary = run_check(path, *options, "--training-phase", "pretrain")
    assert (code, printed) == (0, [])
    assert "2 rows in" in summary
    assert "all can be used" in summary
    assert "longest" in summary
    assert "0.0% of the samples are longer than --seq-length 40." in summary


@pytest.mark.quick
def test_options_that_are_wrong_end_with_one_sentence(processor_folder, write_rows, row, tmp_path):
    path = write_rows(row("Read", "1"))
    model = ("--tokenizer-model", processor_folder, "--seq-length", 40)
    for arguments, message in (
        ((tmp_path / "gone", *model), "No data file at"),
        ((path, *model, "--processes", 0), "0 processes asked for: expected at least 1"),
        ((path, *model, "--seq-length", -5), "--seq-length is -5: expected at least 1"),
        ((path, "--tokenizer-model", tmp_path, "--seq-length", 40), "No tokenizer in"),
        ((0.5, path, path, *model), "expected files (p1 p2), or a weight before each"),
    ):
        code, printed, errors = run_check(*arguments)
        assert (code, printed) == (1, [])
        assert errors.startswith("loongplug: error: ")
        assert message in errors
    wrong = (("--training-phase", "dpo"), *(("--video-fps", rate) for rate in ("nan", "inf", 0)))
    for flag, value in wrong:
        code, printed, errors = run_check(path, *model, flag, value)
        assert (code, printed) == (2, [])
        assert f"Invalid value for '{flag}'" in errors
    for flag in ("--min-pixels", "--max-pixels", "--video-min-pixels", "--video-max-pixels"):
        code, printed, errors = run_check(path, *model, flag, 0)
        assert (code, printed) == (1, [])
        assert f"{flag}" in errors
        assert " 0" in errors


def test_a_killed_process_is_an_error_and_no_hang():
    def die(row: int) -> int:
        if row == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    with pytest.raises(ValueError, match="A process was killed while it read the rows"):
        list(map_rows(die, 100, processes=2, console=Console(stderr=True), title="test"))


@pytest.mark.quick
def test_the_table_has_lengths_that_are_there():
    console = Console(width=80)
    with console.capture() as said:
        console.print(length_table(range(1, 1001), [7] * 1000))
    words = [line.split() for line in said.get().splitlines()]
    assert ["samples", "501", "901", "991", "1,000"] in words
    assert ["visual", "tokens", "7", "7", "7", "7"] in words


@pytest.mark.quick
def test_the_words_count_what_does_not_fit_and_what_packing_fills():
    said = fill_words([6, 4, 6, 4, 11], seq_length=10)
    assert said.startswith("20.0% of the samples are longer than --seq-length 10.")
    assert "Padded to that length, sequences are 50.0% full; with --packing, 100.0%" in said
    assert fill_words([11], seq_length=10) == (
        "100.0% of the samples are longer than --seq-length 10."
    )
