"""The quick reader of headers says what Pillow says, or nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from loongplug.data.plain_headers import plain_size

pytestmark = pytest.mark.quick


def picture(height: int, width: int) -> Image.Image:
    noise = np.random.RandomState(1).randint(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.png", {}),
        ("a.png", {"dpi": (72, 72), "icc_profile": b"x" * 200}),
        ("a.jpg", {}),
        ("a.jpg", {"progressive": True}),
        ("a.jpg", {"icc_profile": b"x" * 200, "comment": b"hello", "dpi": (72, 72)}),
        ("a.jpg", {"subsampling": 0, "restart_marker_blocks": 2}),
    ],
)
@pytest.mark.parametrize(("height", "width"), [(1, 700), (300, 20), (33, 47)])
def test_plain_files_are_read_quickly(
    tmp_path: Path, name: str, options: dict[str, object], height: int, width: int
) -> None:
    picture(height, width).save(tmp_path / name, **options)
    assert plain_size(tmp_path / name) == (height, width)


def test_whatever_may_be_turned_or_is_odd_is_left_to_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = picture(8, 9)
    long = PngInfo()
    long.add_text("comment", "x" * 9000)
    for name, options in (
        ("exif.png", {"exif": exif}),
        ("exif.jpg", {"exif": exif}),
        ("xmp.jpg", {"xmp": b"<x/>"}),
        ("long.png", {"pnginfo": long}),
        ("long.jpg", {"icc_profile": b"x" * 9000}),
        ("a.gif", {}),
        ("a.webp", {}),
    ):
        image.save(tmp_path / name, **options)
        assert plain_size(tmp_path / name) is None, name
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "gone.png", "."):
        assert plain_size(tmp_path / name) is None, name
    image.save(tmp_path / "large.png")
    assert plain_size(tmp_path / "large.png") == (8, 9)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 71)
    assert plain_size(tmp_path / "large.png") is None


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_damaged_headers_give_pillows_size_or_none(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    """Bytes changed or cut: never an exception, never another size than Pillow's."""
    path = tmp_path / name
    picture(20, 30).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(24, 200))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    size = plain_size(path)
    if size is None:
        return
    try:
        with Image.open(path) as image:
            assert size == (image.height, image.width)
    except (OSError, SyntaxError, ValueError):
        pass  # decoding tells what is wrong
