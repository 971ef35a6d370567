"""Nothing but LoongPlug's own files is ever replaced, by any command; streams are written to."""

import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits.make import make_demo_data
from PIL import Image
from typer.testing import CliRunner

from loongplug.bench.step import StepFigures
from loongplug.cli import app
from loongplug.data.inspect import draw_histogram
from loongplug.observe.chrome import MERGED, write_chrome_trace
from loongplug.observe.trace_file import RANK_TRACE, RankTrace, TraceWriter, rank_file
from loongplug.output_files import (
    PICTURE,
    PREDICTIONS,
    check_output,
    figures,
    write_figures,
    write_output,
)
from loongplug.training.progress import StepReport, summarize

pytestmark = pytest.mark.quick

RUN = {
    "loss_first": 4.0,
    "loss_last": 0.5,
    "tokens_per_second": 9.0,
    "train_seconds": 2.0,
    "iterations": 8,
}
EVALUATION = {"exact_match": 0.5, "eval_samples": 4, "eval_seconds": 0.3}
ROW = {"messages": [{"role": "user", "content": "Read"}], "task": "mine"}
STEP = StepFigures(
    ranks=1, warmup=1, step_seconds=(), step_tokens=(), losses=(), peak_memory_bytes=()
)

# What a file of each kind may hold, those of older versions too.
OURS = {
    "metrics": [
        *(RUN, EVALUATION, RUN | EVALUATION, RUN | {"second": RUN} | EVALUATION),
        {**EVALUATION, "scores_per_task": {"read": 1.0}, "relaxed": 0.25, "number": 0.0},
        *(RUN | {"fill_rate": 0.9, "valid_loss": None, "bad_samples": {}}, {"first": RUN}),
    ],
    "estimate": [{"stages": []}, {"layouts": []}],
    "partition": [
        dict.fromkeys(("microbatches", "kept", "flags", "encoder_stages", "splits"), 1),
    ],
    "bench step": [asdict(STEP)],
}
ANOTHERS = [
    *({}, [1], "text", 3, ROW, {"iterations": 500}, EVALUATION | {"mine": "x"}, RUN | {"mine": 1}),
    *(RUN | {"second": RUN | {"mine": 1}}, {"eval_samples": 4}, {"stages": [], "name": "mine"}),
]
# A command, and the file that it would write.
COMMANDS = [
    ("estimate --ranks 1 --json {file}", "file.json"),
    ("partition --ranks 1 --json {file}", "file.json"),
    ("verify --json {file}", "file.json"),
    ("eval --model none --data none.jsonl --json {file}", "file.json"),
    ("eval --model none --data none.jsonl --predictions {file}", "file.jsonl"),
    ("bench step --json {file}", "file.json"),
    ("data inspect none.jsonl --tokenizer-model none --plots {folder}", "images.png"),
    ("trace {folder}", "trace.json"),
    ("trace {folder}", "timeline.png"),
]


def invoke(command: str, file: Path) -> tuple[int, str]:
    words = [word.format(file=file, folder=file.parent) for word in command.split()]
    result = CliRunner().invoke(app, words)
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(("command", "name"), COMMANDS)
def test_each_command_refuses_a_file_of_its_user_at_its_start(tmp_path, command, name):
    file = tmp_path / name
    file.write_text(json.dumps(ROW) + "\n")
    link = tmp_path / "more" / name
    link.parent.mkdir()
    link.symlink_to(file)
    for path in (file, link):
        code, said = invoke(command, path)
        assert code == (2 if command.startswith("verify") else 1), said
        assert f"{path} is there and would be lost" in said
        assert file.read_text() == json.dumps(ROW) + "\n"
        assert link.is_symlink()


def test_an_input_is_refused_whatever_it_is_called(tmp_path):
    file, link = tmp_path / "new.json", tmp_path / "link.jsonl"
    file.touch()
    link.symlink_to(file)
    os.link(file, tmp_path / "second.jsonl")
    for given in (str(file), str(link), f"--train-data-path={tmp_path / 'second.jsonl'}"):
        code, said = invoke(f"estimate --ranks 1 --json {{file}} --train-data-path {given}", file)
        assert code
        assert "which the run needs: give another file" in said


def test_an_evaluation_replaces_neither_its_data_nor_its_other_output(tmp_path):
    data = tmp_path / "data.jsonl"
    data.touch()  # in which nothing tells whose it is
    evaluation = f"eval --model none --data {data}"
    for output in (f"--predictions {data}", f"--json {data}", "--json {file} --predictions {file}"):
        _, said = invoke(f"{evaluation} {output}", tmp_path / "new")
        assert "which the run needs" in said


@pytest.mark.parametrize(("kind", "number"), [(k, n) for k in OURS for n in range(len(OURS[k]))])
def test_files_of_every_version_are_known_by_their_keys(tmp_path, kind, number):
    file = tmp_path / "link.json"
    file.symlink_to(tmp_path / "figures.json")
    content = OURS[kind][number]
    for _ in range(2):
        write_figures(file, content, kind)
        assert json.loads(file.read_text()) == json.loads(json.dumps(content))
    assert file.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "link.json"]


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("content", [*map(json.dumps, ANOTHERS), "{", "\n", "[" * 100_000, "\xff"])
def test_other_files_are_not(tmp_path, kind, content):
    file = tmp_path / "theirs"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="would be lost"):
        check_output(file, figures(kind))
    with pytest.raises(ValueError, match="would be lost"):
        write_figures(file, OURS[kind][0], kind)
    assert file.read_bytes() == content.encode("latin-1")


def test_the_keys_are_those_that_are_written(tmp_path):
    step = StepReport(iteration=1, loss=1.0, tokens=1, capacity=1, seconds=1.0)
    newest = summarize([step], valid_loss=1.0, valid_exact_match=0.5)
    write_figures(tmp_path / "metrics.json", newest, "metrics")
    check_output(tmp_path / "metrics.json", figures("metrics"))


def test_an_empty_file_has_nothing_to_lose(tmp_path):
    for name, kind, content in (
        *(("run", "metrics", RUN), ("partition", "partition", OURS["partition"][0])),
    ):
        file = tmp_path / name
        file.touch()
        check_output(file, figures(kind))
        write_figures(file, content, kind, beside=True)
        assert json.loads(file.read_text()) == content
    (tmp_path / "picture.png").touch()
    check_output(tmp_path / "picture.png", PICTURE)


def test_figures_join_those_of_a_run_or_take_their_place(tmp_path):
    file = tmp_path / "deep" / "metrics.json"
    write_figures(file, {"first": RUN}, "metrics", beside=True)
    write_figures(file, EVALUATION, "metrics", beside=True)
    write_figures(file, {"second": RUN}, "metrics", beside=True)
    assert json.loads(file.read_text()) == {"first": RUN, **EVALUATION, "second": RUN}
    write_figures(file, RUN, "metrics")
    assert json.loads(file.read_text()) == RUN
    assert [path.name for path in file.parent.iterdir()] == ["metrics.json"]


def test_predictions_are_known_line_by_line(tmp_path):
    file = tmp_path / "predictions.jsonl"
    keys = ("row", "task", "question", "answer", "prediction", "score")
    line = json.dumps(dict.fromkeys(keys)) + "\n"
    file.write_text(line * 3)
    write_output(file, line, PREDICTIONS)
    assert file.read_text() == line
    file.write_text(line + json.dumps(ROW) + "\n")
    with pytest.raises(ValueError, match="would be lost"):
        write_output(file, line, PREDICTIONS)


def test_pictures_and_traces_are_known_by_how_they_begin(tmp_path):
    draw_histogram(np.array([1, 2, 2]), tmp_path / "ours.png", label="tokens")
    check_output(tmp_path / "ours.png", PICTURE)
    with Image.open(tmp_path / "ours.png") as picture:
        assert picture.text == {"Software": "LoongPlug"}
        picture.save(tmp_path / "theirs.png")
    TraceWriter(tmp_path, rank=1, world_size=2, device="cpu").close()
    check_output(rank_file(tmp_path, 1), RANK_TRACE)
    trace = RankTrace(rank=0, world_size=1, device="cpu", place={}, events=(), cut_off=False)
    for _ in range(2):
        write_chrome_trace([trace], tmp_path / "trace.json")
    (tmp_path / "theirs.jsonl").write_text('{"rank": 0, "loss": 1}\n')
    (tmp_path / "theirs.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    for name, ours in (
        *(("theirs.png", PICTURE), ("theirs.jsonl", RANK_TRACE), ("theirs.json", MERGED)),
    ):
        with pytest.raises(ValueError, match="would be lost"):
            check_output(tmp_path / name, ours)


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):  # nobody reads it
        write_figures(pipe, RUN, "metrics", beside=True)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_output(pipe, figures("metrics"))
    write_figures(pipe, RUN, "metrics", beside=True)
    assert json.loads(os.read(reader, 2**16)) == RUN
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    with socket.socket(socket.AF_UNIX) as bound, pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # a socket's name is short
        bound.bind("socket")
        for refused in (tmp_path, Path("socket")):
            with pytest.raises(ValueError, match="give a file"):
                write_figures(refused, RUN, "metrics")


def test_standard_output_that_is_a_file_keeps_what_was_printed(tmp_path):
    code = """from pathlib import Path
from loongplug.output_files import write_figures
print("before", flush=True)
write_figures(Path("/dev/stdout"), {"stages": []}, "estimate")"""
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True, timeout=60)
    assert (tmp_path / "log").read_text().split() == ["before", "{", '"stages":', "[]", "}"]


def test_a_demo_goes_into_a_folder_of_its_own(tmp_path):
    def make(folder: str, **more: Any) -> None:
        make_demo_data(tmp_path / folder, train=4, test=2, **more)

    make("demo")
    pictures = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo/images").iterdir()}
    make("demo", new_questions=True)
    make("demo")
    assert all(path.stat().st_mtime_ns == then for path, then in pictures.items())
    for name in ("train.jsonl", "processor/tokenizer.json", "images/0001-32x32.png"):
        folder = name.replace("/", "-")
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(ROW))  # with a demo's keys, and another task
        with pytest.raises(ValueError, match="would be lost"):
            make(folder, new_questions=True)
        assert file.read_text() == json.dumps(ROW)
        assert [path for path in (tmp_path / folder).rglob("*") if path.is_file()] == [file]
