import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from loongplug.data.conversation import Video
from loongplug.data.image_patches import QwenPatches
from loongplug.data.images import image_grid
from loongplug.data.media import MediaLoader, placeholder
from loongplug.data.processor import QWEN_TOKENS, Processor, load_processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor

pytestmark = pytest.mark.quick

WHERE = "rows.jsonl:4"


def media_loader(processor: Processor, **options: int) -> MediaLoader:
    return MediaLoader(processor, videos=VideoProcessor(processor, TIMESTAMPS), **options)


@pytest.mark.parametrize(
    ("height", "width", "grid", "tokens"),
    [
        (32, 32, (1, 2, 2), 1),
        (64, 32, (1, 4, 2), 2),
        (32, 96, (1, 2, 6), 3),
        (45, 70, (1, 2, 4), 2),  # rounded to 32 x 64
        (8, 8, (1, 2, 2), 1),  # below the least size
        (2000, 1000, (1, 44, 22), 242),  # above the greatest
    ],
)
def test_grid_from_the_header_is_the_grid_of_the_pixels(
    processor: Processor,
    tmp_path: Path,
    write_image: Callable[..., str],
    height: int,
    width: int,
    grid: tuple[int, int, int],
    tokens: int,
) -> None:
    path = tmp_path / write_image("a.png", height=height, width=width)
    assert image_grid(path, processor, where=WHERE) == grid
    videos = VideoProcessor(processor, TIMESTAMPS)
    stands = placeholder(path, grid, processor, videos=videos)
    assert (stands.token, stands.text, stands.run) == (QWEN_TOKENS.image, QWEN_TOKENS.image, tokens)
    vision = media_loader(processor).load([path], where=WHERE)
    assert vision.grids.tolist() == [list(grid)]
    assert vision.rows.shape == (4 * tokens, 3 * 2 * 16 * 16)
    assert vision.rows.dtype == torch.float32
    assert vision.grids.dtype == torch.int64


def test_patches_hold_the_pixels_in_merged_order(processor: Processor, tmp_path: Path) -> None:
    pixels = np.random.RandomState(1).randint(0, 256, (32, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    vision = media_loader(processor).load([tmp_path / "a.png"], where=WHERE)
    # Patches of one merged token are neighbours: here the left 32 x 32 first, then the right.
    corners = [(0, 0), (0, 16), (16, 0), (16, 16), (0, 32), (0, 48), (16, 32), (16, 48)]
    for patch, (top, left) in zip(vision.rows, corners, strict=True):
        frames = patch.reshape(3, 2, 16, 16)  # [channel, time, height, width]
        expected = pixels[top : top + 16, left : left + 16].transpose(2, 0, 1) / 127.5 - 1
        for frame in range(2):
            np.testing.assert_allclose(frames[:, frame].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("cache_bytes", [0, 60_000, 2**30])
def test_many_images_come_in_order_whatever_is_cached(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str], cache_bytes: int
) -> None:
    sizes = [(32, 32), (64, 32), (32, 64), (64, 64)]
    paths = [
        tmp_path / write_image(f"{seed}.png", height=height, width=width, seed=seed)
        for seed, (height, width) in enumerate(sizes)
    ]
    alone = [media_loader(processor).load([path], where=WHERE) for path in paths]
    loader = media_loader(processor, cache_bytes=cache_bytes)
    for order in ([0, 1, 2, 3], [3, 1, 3, 0], [2, 2], [1, 0, 2, 3, 1]):
        vision = loader.load([paths[i] for i in order], where=WHERE)
        assert torch.equal(vision.rows, torch.cat([alone[i].rows for i in order]))
        assert torch.equal(vision.grids, torch.cat([alone[i].grids for i in order]))


def test_a_changed_file_is_processed_anew(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str]
) -> None:
    path = tmp_path / write_image("a.png", height=32, width=32, seed=1)
    loader = media_loader(processor)
    before = loader.load([path], where=WHERE)
    write_image("a.png", height=32, width=64, seed=2)
    after = loader.load([path], where=WHERE)
    assert before.grids.tolist() == [[1, 2, 2]]
    assert after.grids.tolist() == [[1, 2, 4]]


def test_no_images_are_a_zero_length_unit(processor: Processor) -> None:
    vision = media_loader(processor).load([], where=WHERE)
    assert vision.rows.shape == (0, 1536)
    assert vision.grids.shape == (0, 3)
    assert vision.grids.dtype == torch.int64


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(
    processor: Processor, tmp_path: Path, orientation: int
) -> None:
    # Opposite sides differ, so that every wrong turn or flip shows.
    upright = np.zeros((32, 96, 3), dtype=np.uint8)
    upright[:16, :32, 0] = 255
    upright[16:, 64:, 1] = 255
    stored = {  # what a camera held that way writes
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.webp"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, lossless=True, exif=exif)
    Image.fromarray(upright).save(tmp_path / "upright.png")
    assert image_grid(path, processor, where=WHERE) == (1, 2, 6)
    loader = media_loader(processor)
    turned = loader.load([path], where=WHERE).rows
    expected = loader.load([tmp_path / "upright.png"], where=WHERE).rows
    assert torch.equal(turned, expected)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_other_colour_modes_become_rgb(processor: Processor, tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (32, 32), (255, 255, 255)).convert(mode).save(tmp_path / "a.png")
    vision = media_loader(processor).load([tmp_path / "a.png"], where=WHERE)
    assert torch.equal(vision.rows, torch.ones(4, 1536))


def test_transparency_reaches_images_and_frames_of_videos(
    processor_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(path)
    for transparency, expected in (("white", 1.0), ("drop", -1.0)):
        loader = media_loader(load_processor(processor_folder, transparency=transparency))
        for medium in (path, Video((path, path), fps=1.0)):
            rows = loader.load([medium], where=WHERE).rows
            assert torch.equal(rows, torch.full_like(rows, expected)), (transparency, medium)


def test_a_grid_needs_the_header_only(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str]
) -> None:
    path = tmp_path / write_image("a.png", height=64, width=32)
    path.write_bytes(path.read_bytes()[:60])  # signature and IHDR, and no pixel data
    assert image_grid(path, processor, where=WHERE) == (1, 4, 2)


def test_files_that_cannot_be_used(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str]
) -> None:
    (tmp_path / "text.png").write_text("no image")
    damaged = tmp_path / write_image("damaged.png", height=64, width=64)
    damaged.write_bytes(damaged.read_bytes()[:200])
    write_image("thin.png", height=2, width=500)
    loader = media_loader(processor)
    for name, message in (
        ("nothing.png", "no image file at .*nothing.png"),
        ("text.png", "text.png is not an image in a format that is read"),
        (".", "cannot be opened"),
        ("thin.png", "thin.png cannot be used: .*aspect ratio"),
    ):
        with pytest.raises(ValueError, match=rf"^{WHERE}: .*{message}"):
            image_grid(tmp_path / name, processor, where=WHERE)
    for name, message in (
        ("nothing.png", "no image file at .*nothing.png"),
        ("text.png", "text.png is not an image in a format that is read"),
        ("damaged.png", "damaged.png is damaged"),
    ):
        with pytest.raises(ValueError, match=rf"^{WHERE}: .*{message}"):
            loader.load([tmp_path / name], where=WHERE)


@pytest.mark.parametrize("length", [100, 2000, -1000])
def test_a_png_cut_short_is_damaged(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str], length: int
) -> None:
    path = tmp_path / write_image("cut.png", height=64, width=64)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"^{WHERE}: image .*cut.png is damaged \("):
        media_loader(processor).load([path], where=WHERE)


def test_a_png_with_a_broken_chunk_is_damaged(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str]
) -> None:
    path = tmp_path / write_image("chunk.png", height=256, width=256)
    content = bytearray(path.read_bytes())
    second = content.index(b"IDAT", content.index(b"IDAT") + 4)
    content[second : second + 4] = b"\x00\x01\x02\x03"
    path.write_bytes(content)
    assert image_grid(path, processor, where=WHERE) == (1, 16, 16)
    with pytest.raises(ValueError, match=rf"^{WHERE}: image .*chunk.png is damaged \(") as caught:
        media_loader(processor).load([path], where=WHERE)
    assert isinstance(caught.value.__cause__, SyntaxError)


def test_an_image_that_unpacks_to_too_many_pixels(
    processor: Processor,
    tmp_path: Path,
    write_image: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / write_image("bomb.png", height=64, width=64)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    message = rf"^{WHERE}: image .*bomb.png has too many pixels"
    with pytest.raises(ValueError, match=message):
        image_grid(path, processor, where=WHERE)
    with pytest.raises(ValueError, match=message):
        media_loader(processor).load([path], where=WHERE)


def test_other_patch_sizes_follow_the_processor(
    processor: Processor, tmp_path: Path, write_image: Callable[..., str]
) -> None:
    path = tmp_path / write_image("a.png", height=84, width=56)
    transform = copy.deepcopy(processor.images.transform)
    transform.patch_size = 14
    other = dataclasses.replace(processor, images=QwenPatches(transform))
    assert image_grid(path, other, where=WHERE) == (1, 6, 4)
