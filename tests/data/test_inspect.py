"""``loongplug data inspect``: what it prints of a sample, and the histograms."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from surveyed import settings_of
from typer.testing import CliRunner

from loongplug.cli import app
from loongplug.data.dataset import ChatDataset
from loongplug.data.inspect import describe, inspect

pytestmark = pytest.mark.quick


def test_a_sample_in_runs_with_its_images(
    processor, write_rows, write_image, write_frames, tmp_path
):
    image = write_image("a.png", height=64, width=96)
    frames = write_frames("f", 4, height=40, width=70)
    turns = [
        {"role": "user", "content": [{"type": "image", "image": image}]},
        {"role": "assistant", "content": "31"},
        {"role": "user", "content": [{"type": "video", "video": frames, "fps": 2}]},
        {"role": "assistant", "content": "7"},
    ]
    path = write_rows({"messages": turns})
    dataset = ChatDataset(path, processor=processor, seq_length=200, training_phase="sft")
    title, *lines = describe(dataset.surveyor(dataset.rows, 0), processor)
    total = len(dataset[0].input_ids)
    trained = int(dataset[0].loss_mask.sum())
    assert title == (
        f"[bold]{path}:1[/bold]: {total} tokens, {trained} of them trained, 2 images and videos"
    )
    assert lines[:2] == [
        f"  image {tmp_path / 'a.png'}, 96 x 64 pixels: 6 tokens",
        f"  video of {tmp_path / 'f0.png'}, 70 x 40 pixels, 4 frames, 2 a second: 4 tokens",
    ]
    runs = lines[2:]
    assert [run[0] for run in runs] == [" ", "+", " ", "+", " "]
    assert sum(int(run[1:8]) for run in runs) == total
    assert sum(int(run[1:8]) for run in runs if run[0] == "+") == trained
    assert "<|vision_start|><|image_pad|> x 6<|vision_end|>" in runs[0]
    assert runs[1] == "+     3  [green]31<|im_end|>[/green]"
    assert runs[2].count("<|video_pad|> x 2") == 2
    assert runs[3] == "+     2  [green]7<|im_end|>[/green]"


def test_the_command(processor_folder, write_rows, write_image, row):
    image = write_image("a.png", height=64, width=32)
    path = write_rows(
        row("Read", "1", images=(image,)), row("Never shown", "2"), row("Read", "3"), "{broken"
    )
    arguments = ["data", "inspect", str(path), "--tokenizer-model", str(processor_folder)]
    result = CliRunner().invoke(app, [*arguments, "--samples", "3"])
    assert result.exit_code == 0, result.output
    for shown in (
        f"{path}:1: ",
        "1<|im_end|>",
        f"{path}:3: ",
        "3<|im_end|>",
        f"{path}:4: not JSON",
    ):
        assert shown in result.stdout
    assert f"{path}:2" not in result.stdout


def count_bars(path: Path) -> int:
    """Runs of bars' colour on the axis of a histogram."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    blue = (pixels[..., 2] > 150) & (pixels[..., 0] < 100)
    rows = np.flatnonzero(blue.any(axis=1))
    bottom = blue[rows[-1] - 2]
    return int((np.diff(bottom.astype(int)) == 1).sum())


@pytest.mark.not_quick
def test_histograms(processor_folder, write_rows, row, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="histograms need it: pip install 'loongplug[plots]'")
    rows = [row("Read", "1" * (1 + 2 * (number % 3))) for number in range(70)]
    inspect(
        [str(write_rows(*rows, "{broken"))],
        settings_of(processor_folder),
        samples=0,
        plots=tmp_path / "plots",
        processes=2,
    )
    printed = capsys.readouterr().out
    assert "1 of 71 rows cannot be used and are left out" in printed
    assert "tokens per sample: 12 to 16, median 14, 90 % up to 16, 978 in 70 samples" in printed
    assert "images and videos per sample: 0 to 0" in printed
    assert count_bars(tmp_path / "plots" / "lengths.png") == 3
    assert count_bars(tmp_path / "plots" / "images.png") == 1


def test_without_matplotlib_the_extra_is_named_before_any_work(
    processor_folder, write_rows, row, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["data", "inspect", str(write_rows(row("Read", "1")))]
    options = ["--tokenizer-model", str(processor_folder), "--plots", str(tmp_path / "plots")]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "pip install 'loongplug[plots]'" in result.stderr.replace("\n", " ")
