"""Images as bytes: the pixels of transformers to the bit, in an eighth of the memory."""

import base64
import copy
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_units import batch_of_extents
from made_media import picture
from on_a_gpu import in_fresh_interpreter
from PIL import Image
from surveyed import dataset_of_media, media_in, survey_of
from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

from loongplug.data.conversation import Video
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_files import InlineFile
from loongplug.data.media_kinds import extent_of
from loongplug.data.media_loader import MediaLoader, PixelBytes, UnitLoader
from loongplug.data.planned_media import MediaBatch
from loongplug.data.processor import QwenPatches
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle
from loongplug.platform import current_platform

WHERE = "rows.jsonl:1"
pytestmark = pytest.mark.quick

SETTINGS: list[dict[str, Any]] = [
    {},
    {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.27, 0.26, 0.28]},
    {"do_normalize": False},
    {"do_rescale": False},
    {"do_rescale": False, "do_normalize": False},
    {"do_resize": False},
    {"rescale_factor": 0.0123},  # its inverse is no number of float32
    {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
]
SETTINGS_OF_VIDEOS = [each for each in SETTINGS if "do_resize" not in each]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_are_those_of_transformers_to_the_bit(processor, settings):
    transform = copy.copy(processor.vision.transform)
    for name, value in settings.items():
        setattr(transform, name, value)
    images = [picture(96, 64), picture(64, 160, seed=1), picture(32, 32, seed=2)]
    if transform.do_resize:
        images.append(picture(75, 190, seed=3))
    expected = transform(images=images, return_tensors="pt")
    patches = QwenPatches(transform)
    coded = patches.coded(images)
    made = [PixelBytes.of_images(patches).decoded(rows) for rows, _ in coded]
    assert torch.equal(torch.cat(made), expected["pixel_values"].float())
    assert [list(grid) for _, grid in coded] == expected["image_grid_thw"].tolist()
    for (rows, _), values in zip(coded, made, strict=True):
        assert rows.dtype == torch.uint8
        assert rows.untyped_storage().nbytes() == rows.nbytes == values.nbytes // 8


def unit_of(*media: Any, loader: MediaLoader) -> MediaBatch:
    grids = [loader.load([each], where=WHERE).grids[0].tolist() for each in media]
    return batch_of_extents(*map(extent_of, media, map(tuple, grids)))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("settings", SETTINGS_OF_VIDEOS, ids=str)
@pytest.mark.parametrize("style", [TIMESTAMPS, VideoStyle(timestamps=False)], ids=["3", "2.5"])
def test_values_of_frames_are_those_of_transformers_to_the_bit(
    processor, tmp_path, write_frames, style, settings, count
):
    kind = Qwen3VLVideoProcessor if style.timestamps else Qwen2VLVideoProcessor
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    transform = kind(**sizes, do_sample_frames=False, cap_pixels_per_frame=False, **settings)
    videos = VideoProcessor(processor, style)
    videos.transform = transform
    names = write_frames("v", count, height=70, width=96)
    video = Video(frames=tuple(tmp_path / name for name in names), fps=2.0)

    frames = [np.asarray(Image.open(path).convert("RGB")) for path in video.frames]
    frames += frames[-1:] * (2 - count)  # what the processors themselves would refuse
    given = torch.from_numpy(np.stack(frames))
    expected = transform([given], return_tensors="pt", input_data_format="channels_last")
    rows, grid = videos.coded(video, where="rows.jsonl:1")
    assert list(grid) == expected["video_grid_thw"][0].tolist()
    values = PixelBytes.of_videos(videos.transform).decoded(rows, grid[1] * grid[2])
    assert torch.equal(values, expected["pixel_values_videos"].float())
    # Each frame once, a byte for a value.
    assert rows.dtype == torch.uint8
    assert rows.untyped_storage().nbytes() == rows.nbytes == count * grid[1] * grid[2] * 3 * 16**2


def test_units_of_images_and_videos_are_loaded_as_bytes(
    processor, tmp_path, write_image, write_frames
):
    videos = VideoProcessor(processor, TIMESTAMPS)
    loader = MediaLoader(processor, videos=videos)
    images = [
        tmp_path / write_image(f"{seed}.png", height=64, width=96, seed=seed) for seed in (1, 2)
    ]
    frames = write_frames("v", 3, height=64, width=64)
    video = Video(frames=tuple(tmp_path / name for name in frames), fps=2.0)
    assert loader.coded is not None

    def load_of(*media: Any) -> UnitLoader:
        return UnitLoader(dataset_of_media(media, processor, videos=videos, where=WHERE))

    unit, load = unit_of(*images, loader=loader), load_of(*images)
    loaded = load(unit)
    assert unit.coded
    assert loaded.rows.dtype == torch.uint8
    values = loader.load(images, where="rows.jsonl:1").rows
    assert torch.equal(loader.coded.decoded(loaded.rows, unit.extents), values)
    assert torch.equal(load(unit).rows, loaded.rows)  # from its cache

    media = (images[0], video, video, images[1], images[0])
    mixed, load = unit_of(*media, loader=loader), load_of(*media)
    assert mixed.coded
    rows = load(mixed).rows
    assert rows.dtype == torch.uint8
    assert len(rows) == mixed.loaded_rows == 3 * 24 + 2 * 3 * 16  # three frames, not four
    decoded = loader.coded.decoded(rows, mixed.extents)
    singly = [loader.load([each], where="rows.jsonl:1").rows for each in media]
    assert torch.equal(decoded, torch.cat(singly))

    (tmp_path / "2.png").write_bytes(b"no image any more")
    (tmp_path / frames[1]).write_bytes(b"nor this")
    broken = load(mixed)
    assert broken.bad.keys() == {1, 2, 3}
    assert broken.rows.dtype == torch.uint8
    assert broken.rows.shape == rows.shape
    assert torch.equal(broken.rows[:24], rows[:24])
    assert torch.equal(broken.rows[-24:], rows[-24:])
    assert not broken.rows[24:-24].any()


def test_nothing_keeps_an_image_that_stands_in_its_row(
    processor, write_rows, write_image, row, tmp_path
):
    """Neither a check nor the cache of pixels, which knows the same image again."""

    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, InlineFile) for each in gc.get_objects())

    content = (tmp_path / write_image("a.png", height=64, width=32)).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    rows = write_rows(row("Read", "1", images=(url,)), row("Read it", "1", images=(url,)))
    data = ChatDataset(
        rows, processor=processor, seq_length=64, training_phase="sft", cache_bytes=0
    )
    loader = MediaLoader(processor, videos=data.videos)
    before = kept()
    for index in range(2):
        assert survey_of(processor, data.rows, index).findings == ()
        assert loader.load(media_in(data, index), where="").rows.shape == (8, 1536)
    assert loader.decoded == 1
    assert kept() == before


@pytest.mark.gpu
def test_on_a_gpu():
    in_fresh_interpreter(__file__, "decodes_on_a_gpu")


def decodes_on_a_gpu() -> None:
    """To the CPU's bits."""
    plain = SimpleNamespace(do_rescale=False, do_normalize=False)
    pixels = PixelBytes.of_images(SimpleNamespace(transform=plain, temporal_patch_size=2))
    rows = torch.randint(0, 256, (64, 768), dtype=torch.uint8)
    made = pixels.decoded(rows.to(current_platform().device))
    assert torch.equal(made.cpu(), pixels.decoded(rows))
