"""Grids, patches and folders of video processors, and the cache of processed videos."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import ImageFile
from transformers import Qwen2VLVideoProcessor
from video_reference import BLOCKS, patches, read_frames, row_of, video

from loongplug.data.conversation import Video
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_loader import MediaLoader
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor

WHERE = "rows.jsonl:4"

pytestmark = pytest.mark.quick


@pytest.mark.not_quick
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
@pytest.mark.parametrize(
    ("height", "width"),
    [(32, 32), (41, 77), (20, 200), (9, 12), (300, 700)],
)
def test_the_grid_from_the_headers_is_transformers_grid(
    family, tmp_path, write_frames, monkeypatch, count, height, width
):
    """Few pixels in all, so that Qwen3-VL's limits depend on the number of frames."""
    names = write_frames("f", count, height=height, width=width)
    theirs = family.theirs.video_processor(
        [read_frames(tmp_path, names)],
        do_sample_frames=False,
        size={"shortest_edge": 8 * 32 * 32, "longest_edge": 40 * 32 * 32},
    )
    videos = VideoProcessor(family.processor, family.style)
    videos.transform.size = type(family.theirs.video_processor.size)(
        shortest_edge=8 * 32 * 32, longest_edge=40 * 32 * 32
    )
    one = Video(tuple(tmp_path / name for name in names), fps=2.0)
    pixels, grid = patches(videos, one, where=WHERE)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded a frame"))
    assert videos.grid(one, where=WHERE) == grid
    assert theirs["video_grid_thw"].tolist() == [list(grid)]
    assert torch.equal(pixels, theirs["pixel_values_videos"])


@pytest.mark.parametrize("cache_bytes", [0, 40_000, 2**30])
def test_images_and_videos_come_in_order_whatever_is_cached(
    family, tmp_path, write_image, write_frames, cache_bytes
):
    def paths(names: list[str]) -> tuple[Path, ...]:
        return tuple(tmp_path / name for name in names)

    media = [
        tmp_path / write_image("a.png", height=32, width=64, seed=1),
        Video(paths(write_frames("x", 3, height=32, width=32)), fps=2.0),
        tmp_path / write_image("b.png", height=64, width=32, seed=2),
        Video(paths(write_frames("y", 4, height=32, width=64)), fps=1.0),
    ]
    media.append(Video(media[1].frames[::-1], fps=2.0))  # the same files are another video
    media.append(Video(media[1].frames, fps=9.0))  # the same pixels

    def fresh(size: int = 2**30) -> MediaLoader:
        videos = VideoProcessor(family.processor, family.style)
        return MediaLoader(family.processor, videos=videos, cache_bytes=size)

    alone = [fresh().load([medium], where=WHERE) for medium in media]
    assert not torch.equal(alone[1].rows, alone[4].rows)
    assert torch.equal(alone[1].rows, alone[5].rows)
    loader = fresh(cache_bytes)
    for order in ([0, 1, 2, 3], [3, 1, 3, 0, 4], [1, 1], [5, 4, 2, 0]):
        vision = loader.load([media[i] for i in order], where=WHERE)
        assert torch.equal(vision.rows, torch.cat([alone[i].rows for i in order]))
        assert torch.equal(vision.grids, torch.cat([alone[i].grids for i in order]))
    before = loader.decoded
    assert torch.equal(loader.load([media[3]], where=WHERE).rows, alone[3].rows)
    assert (loader.decoded > before) == (cache_bytes < 2**30)
    write_image("y2.png", height=32, width=64, seed=77)
    after = loader.load([media[3]], where=WHERE).rows
    half = len(after) // 2  # the first two frames
    assert torch.equal(after[:half], alone[3].rows[:half])
    assert not torch.equal(after[half:], alone[3].rows[half:])


def load_copy(
    processor: Processor, folder: Path, change: Callable[[Path], object]
) -> tuple[Processor, Path]:
    shutil.copytree(processor.folder, folder)
    change(folder)
    return load_processor(folder), folder


def one_video(tmp_path: Path, names: list[str]) -> Video:
    return Video(tuple(tmp_path / name for name in names), fps=2.0)


def test_a_folder_without_a_video_processor_refuses_videos_only(
    processor, tmp_path, write_rows, write_frames
):
    frames = write_frames("f", 2, height=32, width=32)
    rows = write_rows(row_of([{"type": "image", "image": frames[0]}]), row_of([video(frames, 2)]))
    without, _ = load_copy(
        processor, tmp_path / "hf", lambda f: (f / "video_preprocessor_config.json").unlink()
    )
    dataset = ChatDataset(rows, processor=without, seq_length=64, training_phase="sft")
    assert len(dataset[0].extent.media) == 1
    message = r"rows\.jsonl:2: .* no video processor in .*hf: copy video_preprocessor_config\.json"
    with pytest.raises(ValueError, match=message):
        dataset[1]


def test_a_folder_written_by_transformers_5_gives_the_same(family, tmp_path, write_frames):
    family.theirs.save_pretrained(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "video_preprocessor_config.json").exists()
    one = one_video(tmp_path, write_frames("f", 5, height=41, width=77))
    saved = VideoProcessor(load_processor(tmp_path / "saved"), family.style)
    pixels, grid = patches(saved, one, where=WHERE)
    assert saved.grid(one, where=WHERE) == grid
    expected = patches(VideoProcessor(family.processor, family.style), one, where=WHERE)
    assert (grid, pixels.tolist()) == (expected[1], expected[0].tolist())


def test_a_folder_of_qwen2_5_as_published_has_one_file_for_both(
    block_processor, tmp_path, write_frames
):
    def change(folder: Path) -> None:
        (folder / "video_preprocessor_config.json").unlink()
        path = folder / "preprocessor_config.json"
        config = json.loads(path.read_text())
        del config["size"]
        path.write_text(json.dumps(config | {"min_pixels": 4096, "max_pixels": 9216}))

    published, folder = load_copy(block_processor, tmp_path / "hf", change)
    one = one_video(tmp_path, write_frames("f", 4, height=320, width=160))
    videos = VideoProcessor(published, BLOCKS)
    theirs = Qwen2VLVideoProcessor.from_pretrained(str(folder))(
        [read_frames(tmp_path, [frame.name for frame in one.frames])], do_sample_frames=False
    )
    pixels, grid = patches(videos, one, where=WHERE)
    assert theirs["video_grid_thw"].tolist() == [list(grid)]
    assert grid == videos.grid(one, where=WHERE) == (2, 8, 4)
    assert torch.equal(pixels, theirs["pixel_values_videos"])


def test_the_processor_of_another_family_is_refused(
    processor, block_processor, tmp_path, write_frames
):
    one = one_video(tmp_path, write_frames("f", 2, height=32, width=32))
    for other, style, given, expected in (
        (processor, BLOCKS, "Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor"),
        (block_processor, TIMESTAMPS, "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"),
    ):
        message = rf"^{WHERE}: .* is a {given}, but this model takes a {expected}"
        with pytest.raises(ValueError, match=message):
            VideoProcessor(other, style).grid(one, where=WHERE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"patch_size": 14}', "patch_size is 14 for videos but 16 for images"),
        ('{"temporal_patch_size": 4}', "temporal_patch_size is 4 for videos but 2 for images"),
        ('{"merge_size": 1}', "merge_size is 1 for videos but 2 for images"),
        ('{"image_std": [0.5, 0, 0.5]}', r"video processor in .* has image_std .* above 0"),
        ('{"image_mean": [NaN, 0, 0]}', "video processor in .* has image_mean .* finite"),
    ],
)
def test_a_video_processor_that_does_not_fit_the_images_is_refused(
    processor, tmp_path, write_frames, content, message
):
    name = "video_preprocessor_config.json"
    other, _ = load_copy(processor, tmp_path / "hf", lambda f: (f / name).write_text(content))
    one = one_video(tmp_path, write_frames("f", 2, height=32, width=32))
    with pytest.raises(ValueError, match=rf"^{WHERE}: .*{message}"):
        VideoProcessor(other, TIMESTAMPS).grid(one, where=WHERE)
