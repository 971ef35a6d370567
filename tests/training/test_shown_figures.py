"""What a run shows on its way: in lines, in TensorBoard and in wandb."""

import contextlib
import io
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from surveyed import settings_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from loongplug.checkpoint.settings_notes import CARRIED_FOLDER
from loongplug.data.check import index
from loongplug.training import run as training_run
from loongplug.training.run import run


def lines(rank: int, *, flags: list[str], environment: dict[str, str]) -> list[str]:
    os.environ |= environment
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run(flags)
    return shown.getvalue().splitlines()


def train(flags: list[str], *more: str, **environment: str) -> list[str]:
    return run_ranks(lines, 1, flags=[*flags, *more], environment=environment, timeout=120.0)[0]


def test_a_file_has_a_line_for_each_interval_with_all_figures(flags, demo, tmp_path):
    data = tmp_path / "text.jsonl"
    turns = ({"role": "user", "content": "<image>2"}, {"role": "assistant", "content": "2"})
    data.write_text(32 * f"{json.dumps({'messages': turns, 'origin': 'web'})}\n")
    (tmp_path / CARRIED_FOLDER).mkdir()
    (tmp_path / CARRIED_FOLDER / "preprocessor_config.json").write_text('{"image_mean": [7]}')
    said = train(
        [*flags, "--lr", "0.002", "--lr-decay-style", "linear", "--save", str(tmp_path)],
        *("--load", str(tmp_path), "--train-data-path", str(data), "--log-interval", "2"),
        *("--valid-data-path", str(demo / "test.jsonl"), "--eval-iters", "1"),
        *("--eval-interval", "4", "--tensorboard-dir", str(tmp_path / "board")),
        *("--eval-generate", "1"),
    )
    shown = [line for line in said if line.startswith("iteration")]
    assert [line.split(" | ")[0] for line in shown] == [
        *("iteration 1/4", "iteration 2/4", "iteration 4/4", "iteration 4")
    ]
    assert shown[-1].count("validation loss") == 1  # and no second one of the last iteration
    assert shown[-1].endswith("% of 1 answers")
    figures = [figure.strip("0123456789.,") for figure in shown[2].split(" | ")[1:]]
    assert figures == [
        *("loss ", "lr ", "grad norm ", " s/step", " tokens/s", " TFLOP/s per rank"),
        *(" % padding", " GiB", " s left"),
    ]
    # The step's own, not the next one's.
    assert [line.split(" | ")[2] for line in shown[:3]] == ["lr 0.002", "lr 0.0015", "lr 0.0005"]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert board.Scalars("learning-rate")[0].value == pytest.approx(0.002)
    for name in ("step seconds", "tokens per second", "TFLOPs per rank", "memory GiB"):
        events = board.Scalars(name)
        assert [event.step for event in events] == [1, 2, 4]
        assert all(event.value > 0 for event in events)
    assert [event.step for event in board.Scalars("exact match validation")] == [4]
    # What it says of its folders, of rows and of idle encoders, in this order and once.
    words = "the weights' own|without a use|as text|trains, but"
    told = [line for line in said if re.search(words, line)]
    assert len(told) == 6, told
    assert told[0].endswith(", not [7].")
    assert re.fullmatch(rf"keys without a use \(the first at {data}:\d+\): 'origin'", told[1])
    assert re.match(rf"<image> as text, the first at {data}:\d+: no medium", told[2])
    assert told[3] == "Training met keys without a use (rows that have them): 'origin' (32)."
    assert told[4].startswith("Training met <image> as text in 32 rows, the first at ")
    assert told[5].startswith("image_encoder trains, but has no media: weight decay alone moves it")


class BuiltError(Exception):
    """Ends a run where its model is made."""


def lines_of_the_start(rank: int, *, flags: list[str]) -> list[str]:
    def no_model(*args: Any, **options: Any) -> None:
        raise BuiltError

    training_run.ModelProvider = no_model
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(BuiltError):
        run(flags)
    return shown.getvalue().splitlines()


def test_an_encoder_without_media_is_named_at_the_start_by_an_index(flags, demo, tmp_path):
    turns = ({"role": "user", "content": "2"}, {"role": "assistant", "content": "2"})
    data = tmp_path / "text.jsonl"
    data.write_text(32 * f"{json.dumps({'messages': turns})}\n")
    given = [*flags, "--train-data-path", str(data)]
    idle = "image_encoder trains, but has no media: weight decay alone moves it. Freeze it."
    assert idle not in run_ranks(lines_of_the_start, 1, flags=given)[0]
    index([str(data)], settings_of(demo / "processor"), processes=1)
    assert idle in run_ranks(lines_of_the_start, 1, flags=given)[0]
    frozen = [*given, "model.image_encoder.freeze=true"]
    assert idle not in run_ranks(lines_of_the_start, 1, flags=frozen)[0]


def test_wandb_has_them_too_without_a_network(flags, demo, tmp_path):
    """What it writes offline, which `wandb sync` would send."""
    pytest.importorskip("wandb", reason="the package wandb is not installed (loongplug[wandb])")
    train(
        [*flags, "--log-interval", "2", "--save", str(tmp_path / "mine")],
        *("--wandb-project", "charts", "--train-iters", "2", "--eval-iters", "1"),
        *("--valid-data-path", str(demo / "test.jsonl"), "--eval-interval", "2"),
        *("--eval-generate", "1"),
        WANDB_MODE="offline",
        WANDB_SILENT="true",
    )
    (written,) = (tmp_path / "mine").glob("wandb/offline-run-*/*.wandb")
    logged, run_name = read_history(written)
    assert run_name == "mine"
    assert {"learning-rate", "grad-norm", "lm loss", "batch-size"} <= logged[2]  # Megatron's
    assert {"TFLOPs per rank", "tokens per second", "memory GiB", "fill rate"} <= logged[2]
    assert {"lm loss validation", "exact match validation"} <= logged[2]
    assert "TFLOPs per rank" in logged[1]
    assert list((tmp_path / "mine" / "tensorboard").iterdir())


def read_history(path: Path) -> tuple[dict[int, set[str]], str]:
    """The names of what was logged at each step, and the run's name."""
    from wandb.proto import wandb_internal_pb2

    logged: dict[int, set[str]] = {}
    name = ""
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "run":
            name = record.run.display_name
        if record.WhichOneof("record_type") == "history":
            names = {item.key or ".".join(item.nested_key) for item in record.history.item}
            logged.setdefault(record.history.step.num, set()).update(names)
    return logged, name


def records(content: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB, of chunks with checksum, length and kind."""
    place, parts = 7, b""  # behind the file's own header
    while place < len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""
