"""Token counts from headers against the processor's, on images of every strange kind."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_media import picture
from PIL import Image, ImageFile, ImageOps

from loongplug.data.conversation import Medium, Video
from loongplug.data.media_files import decode_image, image_size
from loongplug.data.media_kinds import KINDS, Context
from loongplug.data.media_loader import MediaLoader
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor

WHERE = "rows.jsonl:4"

pytestmark = pytest.mark.quick

Make = Callable[[Path, int, int], Path]


def turned(name: str, orientation: int) -> Make:
    def make(folder: Path, height: int, width: int) -> Path:
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture(height, width).save(folder / name, exif=exif)
        return folder / name

    return make


def in_mode(name: str, mode: str) -> Make:
    def make(folder: Path, height: int, width: int) -> Path:
        picture(height, width).convert(mode).save(folder / name)
        return folder / name

    return make


def transparent_palette(folder: Path, height: int, width: int) -> Path:
    image = picture(height, width).quantize(16)
    image.save(folder / "a.png", transparency=bytes(range(0, 256, 16)))
    return folder / "a.png"


def deep_grey(folder: Path, height: int, width: int) -> Path:
    pixels = np.asarray(picture(height, width))[..., 0].astype(np.uint16) * 256
    Image.fromarray(pixels).save(folder / "a.png")
    return folder / "a.png"


def animated(name: str) -> Make:
    def make(folder: Path, height: int, width: int) -> Path:
        frames = [Image.new("RGB", (width, height), colour) for colour in ("red", "green", "blue")]
        frames[0].save(folder / name, save_all=True, append_images=frames[1:], duration=100)
        return folder / name

    return make


def gif_with_a_small_first_frame(folder: Path, height: int, width: int) -> Path:
    """The screen is larger than the frame, which the frame's own header says."""
    frame_height, frame_width = (height + 1) // 2, (width + 1) // 2
    screen = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    picture(frame_height, frame_width).quantize(16).save(folder / "a.gif")
    content = (folder / "a.gif").read_bytes()
    (folder / "a.gif").write_bytes(content[:6] + screen + content[10:])
    return folder / "a.gif"


def exif_behind_the_pixels(folder: Path, height: int, width: int) -> Path:
    """A PNG may say so late how it is turned that only decoding would tell."""
    make = turned("a.png", 6)
    content = make(folder, height, width).read_bytes()
    at = content.index(b"eXIf") - 4
    length = int.from_bytes(content[at : at + 4], "big") + 12
    chunk, end = content[at : at + length], content.rindex(b"IEND") - 4
    path = folder / "a.png"
    path.write_bytes(content[:at] + content[at + length : end] + chunk + content[end:])
    return path


FILES: dict[str, Make] = {
    "png": in_mode("a.png", "RGB"),
    **{f"jpeg turned {turn}": turned("a.jpg", turn) for turn in range(1, 9)},
    **{f"tiff turned {turn}": turned("a.tiff", turn) for turn in (1, 3, 6, 8)},
    **{f"webp turned {turn}": turned("a.webp", turn) for turn in (2, 5)},
    "png turned": turned("a.png", 6),
    "palette": in_mode("a.png", "P"),
    "palette with alpha": transparent_palette,
    "bits": in_mode("a.png", "1"),
    "grey": in_mode("a.jpg", "L"),
    "deep grey": deep_grey,
    "grey with alpha": in_mode("a.png", "LA"),
    "alpha": in_mode("a.png", "RGBA"),
    "webp with alpha": in_mode("a.webp", "RGBA"),
    "cmyk": in_mode("a.jpg", "CMYK"),
    "cmyk tiff": in_mode("a.tiff", "CMYK"),
    "bmp": in_mode("a.bmp", "RGB"),
    "gif": animated("a.gif"),
    "gif with a small frame": gif_with_a_small_first_frame,
    "moving png": animated("a.png"),
    "moving webp": animated("a.webp"),
}
SIZES = [(33, 47), (64, 32), (31, 97), (1, 150), (150, 1), (7, 7), (601, 999)]


def reference(path: Path, processor: Processor) -> list[int]:
    """The grid that transformers makes of the first frame, upright."""
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    features = processor.images.transform(images=[upright], return_tensors="pt")
    return features["image_grid_thw"][0].tolist()


@pytest.mark.not_quick
@pytest.mark.parametrize("kind", FILES)
def test_tokens_from_the_header_are_the_processors(processor, tmp_path, monkeypatch, kind):
    videos = VideoProcessor(processor, TIMESTAMPS)
    for height, width in SIZES:
        path: Medium = FILES[kind](tmp_path, height, width)
        expected = reference(path, processor)
        with monkeypatch.context() as patch:
            patch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
            grid = KINDS["image"].grid(path, Context(processor, videos, WHERE))
        assert list(grid) == expected, (height, width)
        tokens = KINDS["image"].placeholder(path, grid, Context(processor, videos)).run
        assert tokens == grid[1] * grid[2] // 4
        features = processor.images.transform(
            images=[decode_image(path, where=WHERE)], return_tensors="pt"
        )
        assert len(features["pixel_values"]) == 4 * tokens


@pytest.mark.parametrize("kind", [kind for kind in FILES if "turned" in kind])
def test_turned_images_have_transformers_pixels(processor, tmp_path, kind):
    path = FILES[kind](tmp_path, 33, 47)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(decode_image(path, where=WHERE)), expected)


def test_a_png_that_tells_late_how_it_is_turned_stays_as_it_is(processor, tmp_path):
    path = exif_behind_the_pixels(tmp_path, 32, 96)
    with Image.open(path) as image:
        image.load()
        assert image.getexif()[0x0112] == 6
    assert image_size(path, where=WHERE) == (32, 96)
    assert decode_image(path, where=WHERE).size == (96, 32)


def test_a_frame_of_an_animation_is_its_first(processor, tmp_path):
    for name in ("a.gif", "a.png", "a.webp"):
        image = decode_image(animated(name)(tmp_path, 8, 8), where=WHERE)
        red, green, blue = image.getpixel((4, 4))
        assert red > 200 > 60 > max(green, blue)


@pytest.mark.parametrize(("height", "width"), [(1, 300), (300, 1)])
def test_too_narrow_an_image_is_refused_by_header_and_processor_alike(
    processor, tmp_path, height, width
):
    path = FILES["png"](tmp_path, height, width)
    with pytest.raises(ValueError, match=r"a\.png cannot be used: .*aspect ratio"):
        KINDS["image"].grid(path, Context(processor, VideoProcessor(processor, TIMESTAMPS), WHERE))
    with pytest.raises(ValueError, match="aspect ratio"):
        reference(path, processor)


def test_transparency_reaches_images_and_frames_of_videos(processor_folder, tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(path)
    for transparency, expected in (("white", 1.0), ("drop", -1.0)):
        treated = load_processor(processor_folder, transparency=transparency)
        loader = MediaLoader(treated, videos=VideoProcessor(treated, TIMESTAMPS))
        for medium in (path, Video((path, path), fps=1.0)):
            rows = loader.load([medium], where=WHERE).rows
            assert torch.equal(rows, torch.full_like(rows, expected)), (transparency, medium)
