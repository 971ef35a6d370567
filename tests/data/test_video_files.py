"""Video files: headers, chosen frames, and rows with them against transformers."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from image_units import batch_of_extents
from surveyed import dataset_of_media, survey_of
from video_reference import decode_all, patches, row_of

from loongplug.data import video_files
from loongplug.data.bad_samples import BadSamples
from loongplug.data.conversation import VideoClip, VideoHeader
from loongplug.data.media_kinds import extent_of
from loongplug.data.media_loader import MediaLoader, UnitLoader
from loongplug.data.row_files import JsonlIndex
from loongplug.data.video import TIMESTAMPS, VideoProcessor
from loongplug.data.video_files import decode_frames, video_header

av = pytest.importorskip("av", reason="video files need PyAV: pip install 'loongplug[video]'")

WHERE = "rows.jsonl:4"

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", ["a.mp4", "a.avi", "a.mkv"])  # the last does not count frames
def test_header_and_frames(tmp_path, write_video, name):
    path = tmp_path / write_video(name, 17, fps=12.5)
    header = video_header(path, where=WHERE)
    assert header == VideoHeader(frames=17, fps=12.5, height=48, width=64)
    every = list(decode_all(path))
    for indices in ((0,), (16,), (0, 3, 4, 16), tuple(range(17))):
        frames = decode_frames(VideoClip(path, indices, header), where=WHERE)
        assert len(frames) == len(indices)
        for frame, index in zip(frames, indices, strict=True):
            np.testing.assert_array_equal(frame, every[index])


@pytest.mark.parametrize("turned", [90, 180, 270])
def test_frames_are_turned_upright(tmp_path, write_video, turned):
    """The rotation is counter-clockwise, as numpy turns."""
    path = tmp_path / write_video("a.mp4", 2, turned=turned)
    header = video_header(path, where=WHERE)
    assert (header.height, header.width) == ((48, 64) if turned == 180 else (64, 48))
    (first, _) = decode_frames(VideoClip(path, (0, 1), header), where=WHERE)
    expected = np.rot90(next(decode_all(path)), k=turned // 90)
    np.testing.assert_array_equal(first, expected)


def test_the_header_decodes_one_frame(tmp_path, write_video):
    path = tmp_path / write_video("a.mp4", 40)
    with av.open(str(path)) as container:
        first, *_, last = (packet for packet in container.demux(video=0) if packet.size)
        start, end = first.pos + first.size, last.pos + last.size
    content = path.read_bytes()
    # Behind the first frame, nothing but zeros: only the header can know of the others.
    path.write_bytes(content[:start] + bytes(end - start) + content[end:])
    assert video_header(path, where=WHERE).frames == 40


def cut(path: Path, *, first: int, name: str = "cut.mp4") -> Path:
    """The file's packets from one on, copied as they are: no frame can be decoded ahead of a key's.

    So does ``ffmpeg -c copy``.
    """
    target = path.with_name(name)
    with av.open(str(path)) as source, av.open(str(target), "w") as copy:
        stream = copy.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size and number >= first:
                packet.stream = stream
                copy.mux(packet)
    return target


def test_a_clip_cut_by_stream_copy_ends_with_its_last_frame(processor, tmp_path, write_video):
    path = cut(tmp_path / write_video("a.mp4", 60, codec="libx264"), first=7)
    every = list(decode_all(path))
    header = video_header(path, where=WHERE)
    assert (header.frames, len(every)) == (53, 48)
    said: list[tuple[str, str]] = []
    clip = VideoClip(path, (0, 47, 48, 52), header)
    frames = decode_frames(clip, where=WHERE, odd=lambda *each: said.append(each))
    for frame, index in zip(frames, (0, 47, 47, 47), strict=True):
        np.testing.assert_array_equal(frame, every[index])
    (kind, message) = said.pop()
    assert kind == "fewer frames than its header counts"
    assert message.startswith(f"{WHERE}: video {path}: its header counts 53 frames, but 48 can be")
    decode_frames(VideoClip(path, (0, 47), header), where=WHERE, odd=lambda *_: pytest.fail("odd"))

    # What a run counts, and logs once.
    videos = VideoProcessor(processor, TIMESTAMPS)
    met = BadSamples()
    taken = videos.clip(path, fps=30, where=WHERE)
    assert taken.indices[-1] == 52
    unit = batch_of_extents(extent_of(taken, videos.grid(taken, where=WHERE)))
    rows = dataset_of_media([taken], processor, videos=videos, where=WHERE)
    load = UnitLoader(rows, cache_bytes=0)
    for _ in range(2):
        loaded = load(unit)
        assert not loaded.bad
        met.used(loaded.odd)
    assert not met.counts
    ((remark, found),) = met.remarks.found.items()
    assert (remark, found) == (("video", kind), (2, message))
    assert met.remarks.news() == []
    (line,) = met.remarks.totals()
    assert line == f"videos with {kind}, decoded 2 times, the first: {message}"


def test_a_file_of_which_less_than_half_can_be_decoded_is_refused(tmp_path, write_video):
    # A container that does not say how many frames there are.
    path = cut(tmp_path / write_video("a.mkv", 60, codec="libx264"), first=40, name="cut.mkv")
    count = len(list(decode_all(path)))
    assert count < video_header(path, where=WHERE).frames == 20
    clip = VideoClip(path, (0, 19), video_header(path, where=WHERE))
    decode_frames(replace(clip, header=replace(clip.header, frames=2 * count)), where=WHERE)
    message = rf"^{WHERE}: video .* \({count} frames can be decoded: the header says"
    with pytest.raises(ValueError, match=message):
        decode_frames(replace(clip, header=replace(clip.header, frames=2 * count + 1)), where=WHERE)


def test_a_file_with_other_frames_than_its_index_says_is_refused(tmp_path, write_video):
    path = tmp_path / write_video("a.mp4", 16)
    clip = VideoClip(path, (0, 7), replace(video_header(path, where=WHERE), frames=8))
    with pytest.raises(ValueError, match=rf"^{WHERE}: video {path} .*16 frames now, and had 8"):
        decode_frames(clip, where=WHERE)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_stamps_that_are_not_index_by_rate_are_told(tmp_path, write_video, name):
    """Times stay index / rate, as where models are served."""

    def odd(stamps: Sequence[int]) -> list[tuple[str, str]]:
        path, said = tmp_path / write_video(name, len(stamps), stamps=stamps), []
        header = video_header(path, where=WHERE)
        clip = VideoClip(path, tuple(range(len(stamps))), replace(header, fps=10.0))
        decode_frames(clip, where=WHERE, odd=lambda *each: said.append(each))
        assert clip.times == tuple(number / 10 for number in range(len(stamps)))
        return said

    assert odd(range(12)) == []
    assert odd(range(5, 17)) == []  # an offset is no difference
    assert odd([*range(11), 12]) == []  # one frame
    ((kind, message),) = odd([*range(8), 20, 21, 22, 23])
    assert kind == "stamps more than a frame from index / rate"
    assert "its stamps are up to 12.0 frames from index / rate" in message


def test_data_check_counts_odd_videos_by_row(tmp_path, processor, write_rows, write_video):
    """Also of a file that is decoded once for several rows; none is a fault."""
    odd = write_video("odd.mp4", 12, stamps=[*range(8), 20, 21, 22, 23])
    even = write_video("even.mp4", 12)
    shown = [row_of([{"type": "video", "video": name}]) for name in (even, odd, odd)]
    rows = JsonlIndex(write_rows(*shown))
    checker = partial(survey_of, processor)
    checked = [checker(rows, index) for index in range(3)]
    assert [each.findings for each in checked] == [()] * 3
    remark = ("video", "stamps more than a frame from index / rate")
    assert [each.remarks for each in checked] == [(), (remark,), (remark,)]


def test_rates_of_row_flag_and_folder(processor, tmp_path, write_video):
    path = tmp_path / write_video("a.mp4", 60, fps=10)

    def taken(*, row: float | None, flag: float | None) -> int:
        videos = VideoProcessor(processor, TIMESTAMPS, fps=flag)
        return len(videos.clip(path, fps=row, where=WHERE).indices)

    assert taken(row=None, flag=None) == 12  # two per second, as published
    assert taken(row=None, flag=5.0) == 30
    assert taken(row=1.0, flag=5.0) == 6
    assert taken(row=0.1, flag=None) == 4  # the least
    assert taken(row=100.0, flag=None) == 60  # all


def test_a_video_of_one_frame_is_that_frame_twice(family, tmp_path, write_video):
    path = tmp_path / write_video("a.mp4", 1)
    videos = VideoProcessor(family.processor, family.style)
    clip = videos.clip(path, fps=None, where=WHERE)
    assert clip.indices == (0,)
    pixels, grid = patches(videos, clip, where=WHERE)
    assert grid == videos.grid(clip, where=WHERE)
    assert grid[0] == 1
    halves = pixels.reshape(-1, 3, 2, 16, 16)
    assert torch.equal(halves[:, :, 0], halves[:, :, 1])


def test_the_cache_tells_clips_of_one_file_apart(processor, tmp_path, write_video, monkeypatch):
    path = tmp_path / write_video("a.mp4", 40)
    videos = VideoProcessor(processor, TIMESTAMPS)
    loader = MediaLoader(processor, videos=videos)
    few, many = (videos.clip(path, fps=fps, where=WHERE) for fps in (1, 5))
    assert few.indices != many.indices
    shapes = [loader.load([clip], where=WHERE).grids.tolist() for clip in (few, many)]
    assert shapes[0] != shapes[1]
    monkeypatch.setattr(videos, "coded", lambda *_, **__: pytest.fail("decoded again"))
    assert [loader.load([clip], where=WHERE).grids.tolist() for clip in (few, many)] == shapes


def test_files_that_cannot_be_used(processor, tmp_path, write_video, monkeypatch):
    (tmp_path / "text.mp4").write_text("no video")
    whole = (tmp_path / write_video("whole.avi", 30, height=160, width=160)).read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) // 2])
    for name, message in (
        ("gone.mp4", r"no video file at .*gone\.mp4"),
        (
            "text.mp4",
            r"video .*text\.mp4 is damaged or no video of a kind that is read \(Invalid data",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^{WHERE}: .*{message}"):
            video_header(tmp_path / name, where=WHERE)
    videos = VideoProcessor(processor, TIMESTAMPS)
    clip = videos.clip(tmp_path / "cut.avi", fps=2, where=WHERE)
    with pytest.raises(ValueError, match=rf"^{WHERE}: video .*cut\.avi is damaged"):
        patches(videos, clip, where=WHERE)
    monkeypatch.setattr(video_files, "_MOST_PIXELS", 160 * 160 - 1)
    with pytest.raises(ValueError, match=r"frames of 25600 pixels are above the limit"):
        video_header(tmp_path / "whole.avi", where=WHERE)


def test_without_pyav_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    message = r"PyAV.* is not installed: pip install 'loongplug\[video\]'"
    with pytest.raises(ValueError, match=message):
        video_header(tmp_path / "a.mp4", where=WHERE)
