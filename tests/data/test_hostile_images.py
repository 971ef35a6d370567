"""Files that rows may name as images: of other kinds, no plain files, damaged, deep, enormous."""

import gc
import os
import struct
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_media import encoded, picture
from PIL import Image, ImageFile, features
from transformers.image_transforms import convert_to_rgb

from loongplug.data import media_files
from loongplug.data.media_files import FORMATS, TarMember, decode_image, image_size

pytestmark = pytest.mark.quick

WHERE = "rows.jsonl:4"

USES = pytest.mark.parametrize("use", [image_size, decode_image])
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"
PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF\n"


@pytest.mark.parametrize("name", FORMATS)
def test_listed_formats_are_read_whatever_the_file_is_called(tmp_path, name):
    path = tmp_path / "picture.bin"
    path.write_bytes(encoded(picture(24, 40), name))
    assert image_size(path, where=WHERE) == (24, 40)
    assert decode_image(path, where=WHERE).size == (40, 24)


@USES
@pytest.mark.parametrize("name", ["EPS", "PDF", "ICO", "TGA", "PCX", "JPEG2000", "AVIF"])
def test_other_formats_are_not_opened(tmp_path, use, name):
    if name == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow writes none")
    content = {"EPS": EPS, "PDF": PDF}.get(name) or encoded(picture(24, 40), name)
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    if name != "PDF":  # which Pillow only writes
        assert Image.open(path).format == name
    with pytest.raises(
        ValueError, match=rf"^{WHERE}: .*picture.png is not an image in a format that"
    ):
        use(path, where=WHERE)


def special(folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        return Path("/dev/zero")
    else:
        path.mkdir()
    return path


@USES
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.timeout(120)
def test_only_plain_files_are_opened(tmp_path, monkeypatch, use, kind):
    path = special(tmp_path, kind)
    opened = os.open
    names: list[object] = []
    monkeypatch.setattr(media_files.os, "open", lambda *a: names.append(a[0]) or opened(*a))
    with pytest.raises(
        ValueError, match=rf"^{WHERE}: image .* cannot be opened: it is not a plain"
    ):
        use(path, where=WHERE)
    assert path not in names


@pytest.mark.timeout(120)
def test_a_pipe_that_takes_a_files_place_is_not_waited_for(tmp_path, monkeypatch):
    path, ask = special(tmp_path, "pipe"), os.stat
    monkeypatch.setattr(
        media_files.os, "stat", lambda *a, **k: ask(__file__ if a[0] == path else a[0], *a[1:], **k)
    )
    gc.collect()  # files of tests before
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="it is not a plain file"):
        decode_image(path, where=WHERE)
    with pytest.raises(ValueError, match="it is not a plain file"):
        decode_image(TarMember(path, "a.png", 0, 10), where=WHERE)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_said_to_be_so(tmp_path, name):
    """Cut short, and with bytes changed, at places of a fixed seed."""
    whole, random = encoded(picture(24, 40), name), np.random.RandomState(5)
    path = tmp_path / "a.img"
    refused = 0
    for draw in range(60):
        content = bytearray(whole[: random.randint(len(whole))] if draw % 2 else whole)
        for place in random.randint(0, max(1, min(200, len(content))), 4):
            content[place : place + 1] = random.bytes(1)
        path.write_bytes(content)
        for use in (image_size, decode_image):
            try:
                use(path, where=WHERE)
            except ValueError as error:
                refused += 1
                assert str(error).startswith(f"{WHERE}: "), error  # noqa: PT017
    assert refused > 20


ERRORS = (
    OSError("broken"),
    SyntaxError("broken"),
    MemoryError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_decoder_is_damage_to_its_file(tmp_path, monkeypatch, error):
    path = tmp_path / "a.gif"
    picture(32, 32).save(path)
    said = rf"^{WHERE}: image {path} is damaged \({str(error) or type(error).__name__}\)"
    broken = lambda *_, **__: (_ for _ in ()).throw(error)  # noqa: E731
    for place, name, use in (
        (ImageFile.ImageFile, "load", decode_image),
        (Image, "open", image_size),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, broken)
            with pytest.raises(ValueError, match=said):
                use(path, where=WHERE)


@USES
def test_an_enormous_image_is_refused_by_its_header(tmp_path, use):
    path = tmp_path / "bomb"
    path.write_bytes(b"P6 60000 60000 255\n" + bytes(10))
    with pytest.raises(
        ValueError, match=rf"^{WHERE}: image .*bomb has too many pixels .*178956970"
    ):
        use(path, where=WHERE)


VALUES = np.array([[0, 100, 128, 129, 256, 1000, 32_767, 32_896, 65_534, 65_535]], dtype=np.uint16)
EXACT = [0, 0, 0, 1, 1, 4, 127, 128, 255, 255]  # of 257 each, to the nearest


def sixteen_bits(kind: str) -> bytes:
    if kind == "PGM":
        return b"P5 10 1 65535\n" + VALUES.astype(">u2").tobytes()
    image = Image.fromarray(VALUES)
    if kind == "TIFF, big-endian":
        image = Image.frombytes("I;16B", (10, 1), VALUES.astype(">u2").tobytes())
    return encoded(image, kind.partition(",")[0])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "TIFF, big-endian", "PGM"])
def test_grey_of_sixteen_bits_is_scaled(tmp_path, kind):
    path = tmp_path / "deep"
    path.write_bytes(sixteen_bits(kind))
    assert Image.open(path).mode.startswith("I")
    image = np.asarray(decode_image(path, where=WHERE))
    assert image.shape == (1, 10, 3)
    for channel in range(3):
        assert image[0, :, channel].tolist() == EXACT


def with_bits(tiff: bytes, bits: int) -> bytes:
    """The same file with another number of bits per sample."""
    at = tiff.index(struct.pack("<HHI", 258, 3, 1)) + 8
    return tiff[:at] + struct.pack("<H", bits) + tiff[at + 2 :]


@USES
@pytest.mark.parametrize(
    ("kind", "values", "bits"),
    [
        ("TIFF", np.float32, None),
        ("PPM", np.float32, None),
        ("TIFF", np.int32, None),
        ("TIFF", np.int32, 16),  # with a sign
        ("TIFF", np.uint16, 12),  # which Pillow gives as such of sixteen bits: nearly black
    ],
)
def test_pixels_without_a_known_range_are_refused(tmp_path, use, kind, values, bits):
    path = tmp_path / "deep"
    Image.fromarray(VALUES.astype(values)).save(path, kind)
    if bits is not None:
        path.write_bytes(with_bits(path.read_bytes(), bits))
    with pytest.raises(ValueError, match=rf"^{WHERE}: image .* has pixels of .*: save it with 8"):
        use(path, where=WHERE)


def written(mode: str, kind: str, **options: Any) -> Callable[[Path], None]:
    """Writes noise in that mode, in which 7 is among the values."""

    def write(path: Path) -> None:
        values = np.random.RandomState(0).randint(0, 256, (16, 16, 4), dtype=np.uint8)
        values[:8, :8, :3] = 7
        image = Image.fromarray(values[..., :3] if mode == "RGB" else values)
        (image if mode in ("RGB", "RGBA") else image.convert(mode)).save(path, kind, **options)

    return write


TRANSPARENT = {
    "RGBA": written("RGBA", "PNG"),
    "RGBA in WebP": written("RGBA", "WEBP", lossless=True, exact=True),
    "RGBA in TIFF": written("RGBA", "TIFF"),
    "LA": written("LA", "PNG"),
    "LA in TIFF": written("LA", "TIFF"),
    "PA in TIFF": written("PA", "TIFF"),
    "P with a colour": written("P", "PNG", transparency=7),
    "P with a table": written("P", "PNG", transparency=bytes(range(256))),
    "P in GIF": written("P", "GIF", transparency=7),
    "L with a value": written("L", "PNG", transparency=7),
    "1 with a value": written("1", "PNG", transparency=0),
    "RGB with a colour": written("RGB", "PNG", transparency=(7, 7, 7)),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_what_is_transparent_becomes_white_as_in_transformers(tmp_path, kind):
    """By ``convert_to_rgb`` of 5.24, or as it says where an older one is installed."""
    path = tmp_path / "a"
    TRANSPARENT[kind](path)
    with Image.open(path) as image:
        plain = np.asarray(image.convert("RGB"))
        rgba = np.asarray(image.convert("RGBA")).astype(float)
        if "return_numpy" in signature(convert_to_rgb).parameters:
            expected = convert_to_rgb(image, return_numpy=True)
        else:
            ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
            expected = np.asarray(Image.alpha_composite(ground, image.convert("RGBA")))[..., :3]
    found = np.asarray(decode_image(path, where=WHERE))
    np.testing.assert_array_equal(found, expected)
    alpha = rgba[..., 3:] / 255
    assert np.abs(found - (rgba[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1
    assert (found != plain).any()
    dropped = np.asarray(decode_image(path, where=WHERE, transparency="drop"))
    np.testing.assert_array_equal(dropped, plain)


def test_a_transparent_grey_of_sixteen_bits_becomes_white(tmp_path):
    """Nothing else does, though transformers would clip all of it."""
    path = tmp_path / "deep.png"
    path.write_bytes(sixteen_bits("PNG"))
    with Image.open(path) as image:
        image.save(path, transparency=int(VALUES[0, 1]))
    expected = [EXACT[0], 255, *EXACT[2:]]
    assert np.asarray(decode_image(path, where=WHERE))[0, :, 0].tolist() == expected
    dropped = decode_image(path, where=WHERE, transparency="drop")
    assert np.asarray(dropped)[0, :, 0].tolist() == EXACT
