"""Files that rows may name as videos: playlists, patterns, addresses, pipes, damaged ones."""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loongplug.data import video
from loongplug.data.conversation import VideoClip, VideoHeader
from loongplug.data.media_files import ConfinedFolder, TarMember, open_media_file
from loongplug.data.video import VideoProcessor
from loongplug.data.video_files import decode_frames, video_header

av = pytest.importorskip("av", reason="video files need PyAV: pip install 'loongplug[video]'")

pytestmark = pytest.mark.quick

WHERE = "rows.jsonl:4"
DAMAGED = rf"^{WHERE}: video .* is damaged or no video of a kind that is read \("
HEADER = VideoHeader(frames=4, fps=10.0, height=32, width=48)


def encoded(container: str) -> bytes:
    buffer = BytesIO()
    codec = {"gif": "gif", "mpegts": "mpeg2video"}.get(container, "mpeg4")
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height = 48, 32
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        for shade in (0, 60, 120, 180):
            pixels = np.full((32, 48, 3), shade, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def mp4() -> bytes:
    return encoded("mp4")


def clip(path: object, *indices: int) -> VideoClip:
    return VideoClip(path, indices, HEADER)  # type: ignore[arg-type]


@pytest.mark.parametrize("container", ["mp4", "mov", "3gp", "matroska", "avi", "mpegts", "gif"])
def test_listed_containers_are_read_whatever_the_file_is_called(tmp_path, container):
    path = tmp_path / "video.bin"
    path.write_bytes(encoded(container))
    assert video_header(path, where=WHERE) == HEADER
    first, last = decode_frames(clip(path, 0, 3), where=WHERE)
    assert first.shape == (32, 48, 3)
    assert abs(int(last.mean()) - 180) < 10


def misleading(folder: Path, kind: str, mp4: bytes) -> Path:
    """A file that FFmpeg, asked to open its name, takes for a way to another one."""
    (folder / "other.mp4").write_bytes(mp4)
    if kind == "script":
        path = folder / "a.mp4"
        path.write_text("ffconcat version 1.0\nfile other.mp4\n")
    elif kind == "playlist":
        path = folder / "a.m3u8"
        (folder / "other.ts").write_bytes(encoded("mpegts"))
        path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.ts\n#EXT-X-ENDLIST\n")
    elif kind == "pattern":
        path = folder / "a%d.png"
        path.write_text("nothing")
        Image.new("RGB", (48, 32)).save(folder / "a0.png")
    else:
        path = Path("concat:other.mp4")
        path.write_text("nothing")
    return path


@pytest.mark.parametrize("kind", ["script", "playlist", "pattern", "address"])
def test_no_video_leads_to_other_files(tmp_path, monkeypatch, mp4, kind):
    monkeypatch.chdir(tmp_path)
    path = misleading(tmp_path, kind, mp4)
    with av.open(str(path)) as container:
        assert container.streams.video
    with pytest.raises(ValueError, match=DAMAGED):
        video_header(path, where=WHERE)
    with pytest.raises(ValueError, match=DAMAGED):
        decode_frames(clip(path, 0), where=WHERE)


def test_no_part_of_an_archive_leads_to_other_files(tmp_path, monkeypatch, mp4):
    """It has no name, so that a script's names would start at the working directory."""
    monkeypatch.chdir(tmp_path)
    path = misleading(tmp_path, "script", mp4)
    member = TarMember(path, "a.mp4", offset=0, size=path.stat().st_size)
    with open_media_file(member) as file, av.open(file) as container:
        assert container.streams.video
    with pytest.raises(ValueError, match=rf"{DAMAGED}Invalid argument\)"):
        video_header(member, where=WHERE)


@pytest.mark.timeout(120)
def test_only_plain_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match=rf"^{WHERE}: video {path} cannot be opened: it is no"):
            video_header(path, where=WHERE)


def test_confined_videos(tmp_path, monkeypatch, mp4):
    """By the descriptor that was checked: a link that changes later leads nowhere else."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.mp4").write_bytes(mp4)
    (tmp_path / "out.mp4").write_bytes(b"not to be read")
    (tmp_path / "in" / "link.mp4").symlink_to("../out.mp4")
    root = ConfinedFolder(tmp_path / "in")
    with pytest.raises(ValueError, match=r"link\.mp4 cannot be opened: it is .*/out\.mp4, and"):
        video_header(root / "link.mp4", where=WHERE)
    opened = av.open

    def swapped(source: object, **options: object) -> object:
        (tmp_path / "in" / "a.mp4").unlink()
        (tmp_path / "in" / "a.mp4").symlink_to("../out.mp4")
        return opened(source, **options)

    monkeypatch.setattr(av, "open", swapped)
    assert video_header(root / "a.mp4", where=WHERE) == HEADER


def test_damaged_files_are_said_to_be_so(tmp_path, mp4):
    """Bytes changed at places of a fixed seed; what can still be decoded is."""
    random, path = np.random.RandomState(5), tmp_path / "a.mp4"
    refused = 0
    for _ in range(60):
        content = bytearray(mp4)
        for place in random.randint(0, len(content), 12):
            content[place] = random.randint(256)
        path.write_bytes(content)
        for use, what in ((video_header, path), (decode_frames, clip(path, 0, 3))):
            try:
                use(what, where=WHERE)
            except ValueError as error:
                refused += 1
                assert str(error).startswith(f"{WHERE}: video "), error  # noqa: PT017
    assert refused > 20


ERRORS = (OSError("broken"), IndexError("broken"), OverflowError("broken"), MemoryError())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_decoder_is_damage_to_its_file(tmp_path, monkeypatch, mp4, error):
    (tmp_path / "a.mp4").write_bytes(mp4)

    def broken(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(av, "open", broken)
    with pytest.raises(ValueError, match=rf"{DAMAGED}{str(error) or type(error).__name__}\)"):
        video_header(tmp_path / "a.mp4", where=WHERE)


@pytest.mark.parametrize("header", [HEADER, VideoHeader(2**62, 1e-9, 32, 48)])
def test_rates_and_lengths_that_no_video_has(family, tmp_path, monkeypatch, header):
    """Frames are as many as the processor takes at most, or the row is refused."""
    monkeypatch.setattr(video, "video_header", lambda *_, **__: header)
    videos = VideoProcessor(family.processor, family.style)
    for fps in (0.001, 1e300):
        try:
            found = videos.clip(tmp_path / "a.mp4", fps=fps, where=WHERE)
        except ValueError as error:
            assert str(error).startswith(f"{WHERE}: {tmp_path}/a.mp4 cannot be sampled")  # noqa: PT017
        else:
            assert len(found.indices) <= 768
