"""Data files and media on S3, of a server on this machine: what is fetched, kept and refused."""

import io
import json
import os
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import made_media
import numpy as np
import pytest
from image_units import media_batch
from made_media import encoded
from PIL import Image
from surveyed import grids_of, media_in

from loongplug.data import object_store
from loongplug.data.blend import open_rows
from loongplug.data.conversation import VideoClip
from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.media_files import decode_image, image_size
from loongplug.data.media_loader import MediaLoader, UnitLoader
from loongplug.data.object_store import (
    RemoteFile,
    StoreError,
    data_copy,
    open_remote,
)
from loongplug.data.processor import Processor
from loongplug.data.sample import BadSampleError
from loongplug.data.video_files import decode_frames, video_header
from loongplug.data.workers import Pool, WorkerSettings

WHERE = "rows.jsonl:4"


def picture(height: int, width: int, *, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    return encoded(made_media.picture(height, width, seed), kind, **options)


def jsonl(*rows: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def dataset(
    *files: str | Path, processor: Processor, access: RowAccess = ANY_ROW, flag: str = "--data"
) -> ChatDataset:
    return ChatDataset(
        open_rows([str(file) for file in files], flag=flag, seed=1, access=access),
        processor=processor,
        seq_length=400,
        training_phase="sft",
    )


def pixels(data: ChatDataset, index: int) -> Any:
    loader, media = MediaLoader(data.processor, videos=data.videos), media_in(data, index)
    return loader.load(media, where=WHERE).rows if media else np.zeros(0)


def test_a_size_takes_the_first_bytes_alone(s3):
    content = picture(300, 400)
    file = RemoteFile.named(s3.put("a.png", content))
    assert image_size(file, where=WHERE) == (300, 400)
    assert s3.fetched("a.png") == [2**16] < [len(content)]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned, which Pillow is asked about
    content = picture(800, 1000, kind="JPEG", exif=exif, quality=100)
    file = RemoteFile.named(s3.put("b.jpg", content))
    assert image_size(file, where=WHERE) == (1000, 800)
    assert sum(s3.fetched("b.jpg")) < 300 * 2**10 < len(content)
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.*g"))


def test_pixels_are_fetched_once_and_anew_when_the_file_changes(s3):
    content = picture(32, 48)
    file = RemoteFile.named(s3.put("a.png", content))
    for _ in range(2):
        image = decode_image(file, where=WHERE)
        assert image.tobytes() == Image.open(io.BytesIO(content)).tobytes()
    assert s3.fetched("a.png") == [len(content)]
    assert open_remote(file, keep=False).read() == content
    (place,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("*.png")
    assert place.parents[1].stat().st_mode & 0o777 == 0o700
    place.write_bytes(content[:100])  # the machine went down while it was written
    assert decode_image(file, where=WHERE).size == (48, 32)
    s3.put("a.png", picture(32, 48, seed=1))
    assert decode_image(file, where=WHERE).tobytes() != image.tobytes()


def test_a_file_that_changes_while_it_is_read_is_not_mixed(s3):
    file = RemoteFile.named(s3.put("a.bin", bytes(10**6)))
    with open_remote(file, keep=False) as opened:
        opened.read(10)
        s3.put("a.bin", bytes([1]) * 10**6)
        opened.seek(900_000)
        with pytest.raises(OSError, match="no longer exists"):
            opened.read(10)


@pytest.fixture
def rows(tmp_path, row) -> list[dict[str, Any]]:
    """Rows with and without an image, which lie beside them."""
    (tmp_path / "images").mkdir()
    (tmp_path / "other").mkdir()
    for seed, name in enumerate("ab"):
        (tmp_path / "images" / f"{name}.png").write_bytes(picture(32, 32 + 16 * seed, seed=seed))
    return [
        row("Read the first.", "1", images=("images/a.png",)),
        row("What is it?", "Nothing."),
        row("Read both.", "2", images=("./images/b.png", "other/../images/a.png")),
    ]


def require_same(found: ChatDataset, expected: ChatDataset) -> None:
    assert len(found) == len(expected)
    for index in range(len(found)):
        np.testing.assert_array_equal(found[index].input_ids, expected[index].input_ids)
        assert (pixels(found, index) == pixels(expected, index)).all()


def test_samples_are_those_of_files_here(s3, rows, write_rows, processor, tmp_path):
    """JSONL, a JSON array and Parquet; media beside them, at a media root and by URLs."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    expected = dataset(write_rows(*rows).rename(tmp_path / "a.jsonl"), processor=processor)
    s3.put_folder(tmp_path / "images", prefix="set/images")
    lines = s3.put("set/rows.jsonl", jsonl(*rows))
    found = dataset(lines, processor=processor)
    require_same(found, expected)
    assert found[2].where == f"{lines}:3"
    require_same(
        dataset(s3.put("set/rows.json", json.dumps(rows).encode()), processor=processor), expected
    )
    turns = [{"from": "human", "value": "<image>Read"}, {"from": "gpt", "value": "1"}]
    plain = [{"conversations": turns, "image": f"images/{name}.png"} for name in "ab"]
    parquet.write_table(pa.Table.from_pylist(plain), tmp_path / "t.parquet")
    table = dataset(s3.put("set/t.parquet", tmp_path / "t.parquet"), processor=processor)
    require_same(table, dataset(write_rows(*plain), processor=processor))
    assert table[1].where == "s3://bucket/set/t.parquet:2"
    here = write_rows(*rows)
    root = RowAccess(media_root="s3://bucket/set/")
    require_same(dataset(here, processor=processor, access=root), expected)
    there = s3.put("rows.jsonl", jsonl(*rows))
    require_same(
        dataset(there, processor=processor, access=RowAccess(media_root=tmp_path)), expected
    )
    for each in rows:
        for part in each["messages"][0]["content"]:
            if "image" in part:
                part["image"] = "s3://bucket/set/" + part["image"]
    require_same(dataset(write_rows(*rows), processor=processor), expected)
    assert len(dataset("1", lines, "2", str(here), processor=processor)) == 9


def test_videos_are_read_by_pieces_and_then_kept(s3, tmp_path):
    av = pytest.importorskip("av", reason="video files need PyAV")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 640, 480, "yuv420p"
        stream.bit_rate = 10**8
        for frame in range(20):
            noise = np.random.RandomState(frame).randint(0, 256, (480, 640, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode(None))
    here = tmp_path / "a.mp4"
    file = RemoteFile.named(s3.put("a.mp4", here))
    assert video_header(file, where=WHERE) == video_header(here, where=WHERE)
    assert sum(s3.fetched("a.mp4")) < 2**20 < here.stat().st_size
    header = video_header(here, where=WHERE)
    for path in (file, here):
        clip = VideoClip(path, (0, 19), replace(header, frames=20))
        frames = decode_frames(clip, where=WHERE)
        if path == file:
            expected = frames
    np.testing.assert_array_equal(frames, expected)
    before = len(s3.fetched("a.mp4"))
    assert s3.fetched("a.mp4")[-1] == here.stat().st_size
    decode_frames(replace(clip, path=file), where=WHERE)
    assert len(s3.fetched("a.mp4")) == before


def test_images_of_a_sample_are_asked_for_at_one_time(s3, write_rows, row, processor):
    urls = tuple(s3.put(f"{n}.png", picture(32, 32, seed=n)) for n in range(12))
    rows = write_rows(row("Read", "1", images=urls), row("Read", "1", images=(*urls[:1], "gone")))
    data = dataset(rows, processor=processor)
    assert s3.most_at_once == 1
    s3.pause = 0.3
    assert len(grids_of(data[0])) == 12
    assert s3.most_at_once > 3
    with pytest.raises(BadSampleError, match="gone"):
        data[1]
    s3.pause = 0.0
    found = pixels(data, 0).reshape(12, -1)
    for url, each in zip(urls, found, strict=True):
        alone = dataset(write_rows(row("Read", "1", images=(url,))), processor=processor)
        assert (pixels(alone, 0).reshape(-1) == each).all()


def test_what_is_missing_is_a_bad_sample_and_the_store_is_not(s3, write_rows, row, processor):
    urls = ("s3://bucket/gone.png", "s3://no-bucket/a.png", "s3://!/a.png", "s3://bucket")
    long = f"s3://bucket/{'a' * 1025}"
    urls += ("s3://bucket/../../a.png", long, s3.put("a.png", picture(32, 32)))
    data = dataset(write_rows(*(row("Read", "1", images=(u,)) for u in urls)), processor=processor)
    for index, reason in enumerate(
        ("no image file at s3://bucket/gone.png", "no image file at s3://no-bucket/a.png")
        + ("it is not s3://BUCKET/KEY",) * 3
        + ("its name is longer than 1,024 bytes",)
    ):
        with pytest.raises(BadSampleError, match=reason) as caught:
            data[index]
        assert caught.value.sample.kind == "media"
        assert "\n" not in str(caught.value)
    batch, load = media_batch([6], [data[6]]), UnitLoader(data)
    s3.stop()
    with pytest.raises(StoreError):  # and not a sample whose pixels are bad
        load(batch)
    fresh = dataset(write_rows(row("Read", "1", images=urls[-1:])), processor=processor)
    with pytest.raises(StoreError, match=r"s3://bucket/a\.png cannot be read \(.*onnect") as down:
        fresh[0]
    assert not isinstance(down.value, BadSampleError)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: s3://bucket/a\.png cannot be read"):
        fresh.text_parts([0])
    with pytest.raises(StoreError):
        image_size(RemoteFile.named("s3://bucket/b.jpg"), where=WHERE)


def test_no_credentials_and_no_package_are_told(s3, monkeypatch):
    file = RemoteFile.named(s3.put("a.jsonl", b"{}"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(ValueError, match=r"Unable to locate credentials\): look at the network"):
        data_copy(file)
    object_store._store.cache_clear()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'loongplug\[s3\]'\.$"):
        data_copy(file)


def test_a_file_that_may_not_be_read_is_the_files_fault(s3):
    """What a store says of one file; what it says of the credentials is told apart."""
    file = RemoteFile.named(s3.put("a.png", b""))

    class RefusedError(Exception):
        def __init__(self, code: str) -> None:
            super().__init__(code)
            self.response = {"Error": {"Code": code}}

    class Store:
        later = "AccessDenied"

        def cat_file(self, url: str, **_: Any) -> bytes:
            raise RefusedError(self.later)

    denied = PermissionError("Forbidden")
    denied.__cause__ = RefusedError("403")
    told = object_store._as_told(file, denied, Store())
    assert isinstance(told, OSError)
    Store.later = "ExpiredToken"
    assert isinstance(object_store._as_told(file, denied, Store()), StoreError)


def test_files_of_data_that_cannot_be_read_are_refused(s3):
    s3.put("set/rows.jsonl", b"{}\n")
    s3.put("bad.json", b'[{"text": "a"')
    for url, message in (
        ("s3://bucket/gone.jsonl", r"^No data file at s3://bucket/gone\.jsonl: expected"),
        ("s3://no-bucket/a.jsonl", "^No data file at s3://no-bucket/a.jsonl: expected"),
        ("s3://bucket/set", "^No data file at s3://bucket/set: .* folders are not"),
        ("s3://bucket/bad.json", r"^s3://bucket/bad\.json:1: an object that does not end"),
        ("s3://simplecache::/a", "it is not s3://BUCKET/KEY"),
    ):
        with pytest.raises(ValueError, match=message):
            open_rows([url], flag="--data", seed=1)


def test_a_chain_of_protocols_is_a_name_like_any_other(write_rows, row, processor):
    path = write_rows(row("Read", "1", images=("simplecache::s3://bucket/a.png",)))
    with pytest.raises(BadSampleError, match=r"no image file at .*/simplecache::s3:/bucket/a\.png"):
        dataset(path, processor=processor)[0]


def test_media_are_confined(s3, write_rows, row, processor, tmp_path):
    s3.put("set/a.png", picture(32, 32))
    s3.put("set-of-others/a.png", picture(32, 32))
    (tmp_path / "a.png").write_bytes(picture(32, 32))
    outside = ("../set-of-others/a.png", "s3://bucket/set-of-others/a.png", f"{tmp_path}/a.png")
    outside += ("s3://bucket/set/../set-of-others/a.png", "s3://set/a.png")
    inside = ("a.png", "s3://bucket/set/a.png", "../set/a.png")
    rows = [row("Read", "1", images=(name,)) for name in (*outside, *inside)]
    path = write_rows(*rows)
    access = RowAccess(media_root="s3://bucket/set", confine_media=True)
    confined = dataset(path, processor=processor, access=access)
    for index in range(len(outside)):
        with pytest.raises(BadSampleError, match="--confine-media takes only what lies in s3://"):
            confined[index]
    for index in range(len(outside), len(rows)):
        assert len(media_in(confined, index)) == 1
    here = dataset(path, processor=processor, access=RowAccess(confine_media=True))
    with pytest.raises(BadSampleError, match=f"takes only what lies in {tmp_path}"):
        here[1]


def _copied(url: str) -> str:
    return str(data_copy(RemoteFile.named(url)))


def test_processes_copy_a_data_file_once(s3):
    content = jsonl(*({"text": str(number)} for number in range(10_000)))
    url = s3.put("rows.jsonl", content)
    with get_context("fork").Pool(4) as pool:
        (place,) = set(pool.map(_copied, [url] * 8, chunksize=1))
    assert Path(place).read_bytes() == content
    assert s3.fetched("rows.jsonl") == [len(content)]


def test_forked_processes_have_connections_of_their_own(s3, rows, processor, tmp_path):
    s3.put_folder(tmp_path / "images", prefix="images")
    data = dataset(s3.put("rows.jsonl", jsonl(*rows)), processor=processor)
    expected = [data[index].input_ids for index in range(3)]  # this process has used the store
    data = dataset("s3://bucket/rows.jsonl", processor=processor)
    pool = Pool(data.text_parts, settings=WorkerSettings(processes=2))
    work = pool.ordered(iter([[0, 1], [2], [2, 0]]))
    found = [sample.input_ids for part in work for sample in part]
    pool.close()
    for ids, index in zip(found, (0, 1, 2, 2, 0), strict=True):
        np.testing.assert_array_equal(ids, expected[index])
