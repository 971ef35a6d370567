"""``--max-pixels`` and its like: grids and pixels follow them, whatever the folder says."""

from math import prod
from pathlib import Path

import pytest
from PIL import Image
from video_reference import patches

from loongplug.data.conversation import Video
from loongplug.data.data_options import PixelLimits
from loongplug.data.media_kinds import KINDS, Context
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle

TOKEN = 32 * 32  # pixels of one visual token of the demo's models


def limited(folder: Path, **limits: int) -> Processor:
    return load_processor(folder, pixel_limits=PixelLimits(**limits))


@pytest.mark.parametrize(
    ("limits", "most", "least"),
    [({}, 64, 64), ({"max_pixels": 9 * TOKEN}, 9, 7), ({"min_pixels": 100 * TOKEN}, 121, 100)],
)
def test_images(processor_folder, tmp_path, limits, most, least):
    """The grid that is planned by is the one of the pixels that are made."""
    Image.new("RGB", (256, 256), (9, 9, 9)).save(tmp_path / "a.png")
    processor = limited(processor_folder, **limits)
    videos = VideoProcessor(processor, TIMESTAMPS)
    grid = KINDS["image"].grid(tmp_path / "a.png", Context(processor, videos, "row"))
    assert least <= grid[1] * grid[2] / 4 <= most
    made = processor.images.transform(images=[Image.open(tmp_path / "a.png")], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [list(grid)]


@pytest.mark.parametrize(
    ("style", "tokens"), [(TIMESTAMPS, 2 * 4), (VideoStyle(timestamps=False), 2 * 8)]
)
def test_videos(processor_folder, block_processor, tmp_path, write_frames, style, tokens):
    """Qwen3-VL counts all four frames together, Qwen2.5-VL each."""
    folder = processor_folder if style.timestamps else block_processor.folder
    names = write_frames("f", 4, height=256, width=256)
    video = Video(tuple(tmp_path / name for name in names), fps=2.0)
    free = VideoProcessor(load_processor(folder), style).grid(video, where="row")
    processor = VideoProcessor(limited(folder, video_max_pixels=16 * TOKEN), style)
    pixels, grid = patches(processor, video, where="row")
    assert processor.grid(video, where="row") == grid
    assert len(pixels) == prod(grid)
    assert free[1] * free[2] > grid[1] * grid[2]
    assert prod(grid) / 4 <= tokens * 2
    image = tmp_path / names[0]  # images are as the folder says
    context = Context(processor._processor, processor, "row")
    assert KINDS["image"].grid(image, context) == (1, 16, 16)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_pixels": TOKEN - 1}, "--min-pixels is 1024 and --max-pixels 1023"),
        ({"min_pixels": 0}, "--min-pixels is 0 and"),
        ({"min_pixels": 4000, "max_pixels": 3000}, "--min-pixels is 4000 and --max-pixels 3000"),
        ({"video_max_pixels": 5}, "--video-max-pixels 5"),
    ],
)
def test_limits_that_leave_no_size(processor_folder, limits, message):
    """They are told before a row is read, of videos too."""
    with pytest.raises(ValueError, match=message):
        VideoProcessor(limited(processor_folder, **limits), TIMESTAMPS)
