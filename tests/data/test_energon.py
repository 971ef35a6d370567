"""Prepared energon datasets as rows: the same samples as JSONL, by place, with nothing unpacked."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from energon_folders import of_demo, prepare, write_shard
from image_units import media_of
from local_loader import local_loader, require_alike
from made_media import encoded, picture, write_video
from PIL import ImageFile
from surveyed import grids_of, media_in, settings_of

from loongplug.data.blend import open_rows
from loongplug.data.check import check
from loongplug.data.data_options import RowAccess
from loongplug.data.dataset import ChatDataset
from loongplug.data.energon import EnergonRows
from loongplug.data.fingerprint import fingerprint
from loongplug.data.media_files import ChangedFileError
from loongplug.data.processor_folder import load_processor

pytest.importorskip("megatron.energon")

ANSWER = {"role": "assistant", "content": "Yes."}


def png(*, height: int = 32, width: int = 32, seed: int = 0) -> bytes:
    return encoded(picture(height, width, seed))


def of_samples(folder: Path, *samples: dict[str, Any], **options: Any) -> EnergonRows:
    write_shard(folder / "a.tar", [(f"k{n}", parts) for n, parts in enumerate(samples)])
    return EnergonRows(prepare(folder, {"train": ".*"}, **options), split="train")


@pytest.fixture(scope="module")
def prepared(demo, tmp_path_factory) -> Path:
    return of_demo(demo, tmp_path_factory.mktemp("energon"), shards=4, validation=16)


def chats(rows: Any, folder: Path) -> ChatDataset:
    return ChatDataset(
        rows, processor=load_processor(folder), seq_length=80, training_phase="sft", cache_bytes=0
    )


@pytest.fixture
def both(demo, prepared) -> tuple[ChatDataset, ChatDataset]:
    rows = EnergonRows(prepared, split="train")
    return chats(demo / "train.jsonl", demo / "processor"), chats(rows, demo / "processor")


def test_samples_are_those_of_the_same_rows_as_jsonl(both, monkeypatch):
    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded an image")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    jsonl, energon = both
    assert len(jsonl) == len(energon) == 64
    for number in (*range(0, 64, 3), 63):
        one, other = jsonl[number], energon[number]
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert grids_of(one) == grids_of(other)
        shard, sample = divmod(number, 16)
        assert other.where.endswith(f"train/shard_{shard}.tar:{sample + 1}")


def test_splits_blends_and_the_whole(demo, prepared):
    assert len(EnergonRows(prepared, split="val")) == 16
    assert len(EnergonRows(prepared, split=None)) == 80
    with pytest.raises(ValueError, match="cannot be read for the split test"):
        EnergonRows(prepared, split="test")
    files = [str(prepared), str(demo / "test.jsonl")]
    blend = open_rows(files, flag="--x", seed=0, split="train")
    assert len(blend) == 80
    assert {blend.where(n).rpartition(":")[0].rpartition(".")[2] for n in range(80)} == {
        "tar",
        "jsonl",
    }


def test_media_by_name_by_order_and_as_frames(tmp_path, processor):
    wide, high, still = png(width=64), png(height=64), png()
    media = {"jpg": wide, "b.png": high}
    ask = {"role": "user", "content": "<image><image>Which?"}
    turns = [{"from": "human", "value": "<image>\n<image>Which?"}, {"from": "gpt", "value": "Yes."}]
    one = {"type": "image"}
    once, twice = ({"role": "user", "content": [one] * count} for count in (1, 2))
    rows = of_samples(
        tmp_path / "d",
        {"json": {"messages": [ask, ANSWER]}, **media},  # in their order
        {"json": {"messages": [ask, ANSWER], "images": ["k1.b.png", "jpg"]}, **media},
        {"json": turns, **media},
        {"b.png": high, "jpg": wide, "x.json": [twice, ANSWER]},
        {"json": {"conversations": turns, "image": ["jpg", "jpg"]}, **media},
        {
            "json": {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "video", "video": ["jpg", "c.jpg"], "fps": 2.0}],
                    },
                    ANSWER,
                ]
            },
            "jpg": still,
            "c.jpg": still,
        },
        {"json": {"messages": [{"role": "user", "content": "No picture."}, ANSWER]}},
        # Named beside parts without a path: the names count, and not all of the media are taken.
        {"json": {"messages": [twice, ANSWER], "images": ["b.png", "k7.jpg"]}, **media},
        {"json": {"messages": [once, ANSWER], "images": ["b.png"]}, **media},
    )
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    w, h = (1, 2, 4), (1, 4, 2)
    assert [grids_of(dataset[n]) for n in range(9)] == [
        (w, h), (h, w), (w, h), (h, w), (w, w), ((1, 2, 2),), (), (h, w), (h,),
    ]  # fmt: skip


def test_the_shard_in_the_docs_is_read(tmp_path, processor):
    text = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
    block = text.partition("which a test reads:\n\n```\n")[2].partition("```")[0]
    samples: dict[str, dict[str, Any]] = {}
    for line in block.splitlines():
        name, _, content = line.partition(" ")
        key, _, part = name.partition(".")
        samples.setdefault(key, {})[part] = content.strip().encode() or png(seed=len(name))
    write_shard(tmp_path / "d" / "a.tar", list(samples.items()))
    rows = EnergonRows(prepare(tmp_path / "d", {"train": ".*"}), split="train")
    dataset = ChatDataset(rows, processor=processor, seq_length=80, training_phase="sft")
    assert [len(media_in(dataset, n)) for n in range(len(rows))] == [1, 2]


def test_a_video_is_read_out_of_its_shard(tmp_path, processor):
    """Its index stands at the file's end, and another video follows in the shard."""
    videos = []
    for number in range(2):
        name = tmp_path / f"{number}.mp4"
        write_video(name, 6, fps=4, height=32, seed=number)
        videos.append(name.read_bytes())
    messages = [{"role": "user", "content": "<video>What?"}, ANSWER]
    rows = of_samples(
        tmp_path / "d", *({"json": {"messages": messages}, "mp4": video} for video in videos)
    )
    files = tmp_path / "rows.jsonl"
    lines = [json.dumps({"messages": messages, "videos": [f"{n}.mp4"]}) for n in range(2)]
    files.write_text("\n".join(lines))
    loaders = [
        local_loader(
            ChatDataset(source, processor=processor, seq_length=64, training_phase="sft"),
            micro_batch_size=2,
        )
        for source in (rows, files)
    ]
    one, other = (next(each) for each in loaders)
    require_alike(one, other)
    half = len(media_of(one).rows) // 2
    assert not torch.equal(media_of(one).rows[:half], media_of(one).rows[half:])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"json": b"{broken"}, "the part json: not JSON"),
        ({"json": b'{"text": "a", "text": "b"}'}, 'the part json: .* has the key "text" twice'),
        ({"json": b"3"}, "a JSON int where an object or a list"),
        ({"txt": b"Hello"}, "has 0 JSON parts among txt: expected one"),
        ({"a.json": b"{}", "b.json": b"{}"}, "has 2 JSON parts among a.json, b.json"),
        (
            {"json": {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}},
            "1 places for images without a name, but the sample has 0 image parts",
        ),
        (
            {"json": {"text": "<image>"}, "jpg": b"", "png": b""},
            "1 <image> markers in the text for 2 images",
        ),
        ({"json": {"text": "<image>", "videos": 3}, "jpg": b""}, "videos is 3, but"),
        ({"json": {"text": "<image>", "image": "cat.jpg"}, "jpg": b""}, "no part 'cat.jpg' in"),
        ({"json": {"text": "<image>", "image": "/etc/hostname"}}, "no part '/etc/hostname' in"),
        ({"json": {"text": "Hi <image>"}, "jpg": b"no image"}, "a.tar:k1.jpg is not an image"),
        ({"json": {"text": "Hi"}, "a.PKL": b"x"}, "the parts a.PKL are pickled"),
    ],
)
def test_what_cannot_be_used_says_where(tmp_path, processor, parts, message):
    good = {"json": {"text": "Hello"}}
    dataset = ChatDataset(
        of_samples(tmp_path / "d", good, parts),
        processor=processor,
        seq_length=64,
        training_phase="pretrain",
    )
    assert len(dataset[0]) > 0
    with pytest.raises(ValueError, match=rf"^\S*a\.tar:2: .*{message}"):
        dataset[1]


def test_a_row_above_the_limit_is_refused(tmp_path):
    of_samples(tmp_path / "d", {"json": {"text": "x" * 2**20}}, {"json": {"text": "x"}})
    rows = EnergonRows(tmp_path / "d", split="train", access=RowAccess(max_row_mib=1))
    with pytest.raises(ValueError, match=r"a\.tar:1: the row has 1\.0 MiB, but --max-row-mib is 1"):
        rows.read(0)
    assert rows.read(1) == {"text": "x"}


class _Marks:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_nothing_is_unpickled_or_imported(tmp_path, processor):
    mark, loaded = tmp_path / "unpickled", tmp_path / "imported"
    evil = pickle.dumps(_Marks(mark))
    folder = tmp_path / "d"
    names = ("pth", "pt", "pyd", "pkl", "pickle", "npy", "npz", "bin")
    rows = of_samples(folder, *({"json": {"text": "Hi"}, name: evil} for name in names))
    (folder / "evil.py").write_text(f"open({str(loaded)!r}, 'w')\n")
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: evil\n__class__: Evil\nsample_loader: evil.py:x\npart_filter: evil.py:y\n"
    )
    rows = EnergonRows(folder, split="train")
    for number, name in enumerate(names):
        if name in ("npy", "npz", "bin"):
            assert rows.read(number) == {"text": "Hi"}
        else:
            with pytest.raises(ValueError, match="are pickled"):
                rows.read(number)
    assert not mark.exists()
    assert not loaded.exists()


def test_excluded_samples_and_shards_are_left_out(demo, tmp_path):
    texts = [[(f"{shard}{n}", {"json": {"text": f"{shard}{n}"}}) for n in "012"] for shard in "abc"]
    for shard, samples in zip("abc", texts, strict=True):
        write_shard(tmp_path / f"{shard}.tar", samples)
    prepare(tmp_path, {"train": ".*"}, exclude=("a.tar/a1", "b.tar", "c.tar/c{0..1}"))
    rows = EnergonRows(tmp_path, split="train")
    assert [rows.read(n)["text"] for n in range(len(rows))] == ["a0", "a2", "c2"]
    assert [rows.where(n).rpartition("/")[2] for n in range(3)] == ["a.tar:1", "a.tar:3", "c.tar:3"]


def test_a_changed_dataset_has_another_fingerprint(demo, tmp_path):
    folder = of_demo(demo, tmp_path / "d", shards=2)
    processor = load_processor(demo / "processor")

    def noted() -> Any:
        return fingerprint([EnergonRows(folder, split="train")], processor)["rows"]

    before = noted()
    moved = folder.rename(tmp_path / "moved")
    folder = moved
    assert noted() == before
    shard = folder / "train" / "shard_1.tar"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"digit", b"Digit", 1))
    assert noted() != before
    shard.write_bytes(content)
    split = folder / ".nv-meta" / "split.yaml"
    names = split.read_text()
    split.write_text(names.replace("exclude: []", "exclude:\n- train/shard_0.tar/0-0000"))
    assert split.read_text() != names
    assert noted() != before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard: shard.unlink(), "shard_0.tar is missing"),
        (lambda shard: shard.with_suffix(".tar.idx").unlink(), "shard_0.tar.idx is missing"),
        (lambda shard: shard.with_suffix(".tar.idx").write_bytes(b"12345678"), "ends before"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:700]), "cannot be read there"),
    ],
    ids=["no-shard", "no-index", "short-index", "cut-shard"],
)
def test_damaged_datasets_say_what_is_wrong(demo, tmp_path, damage, message):
    folder = of_demo(demo, tmp_path, shards=2)
    damage(folder / "train" / "shard_0.tar")
    with pytest.raises(ValueError, match=message):
        EnergonRows(folder, split="train").read(0)


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize(
    "change", [Path.unlink, lambda shard: shard.write_bytes(shard.read_bytes() + bytes(512))]
)
def test_a_shard_that_changes_is_no_bad_sample(demo, tmp_path, change, read_before):
    rows = EnergonRows(of_demo(demo, tmp_path, shards=2), split="train")
    if read_before:
        rows.read(0)
    change(rows.files[0])
    with pytest.raises(ChangedFileError, match=r"shard_0\.tar has changed since the start"):
        rows.read(0)
    assert rows.read(len(rows) - 1), "the other shard has not changed"


def damaged_header(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[1024 + 3] ^= 1  # of the second member's header
    shard.write_bytes(content)


def with_index(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(shard: Path) -> None:
        index = shard.with_suffix(".tar.idx")
        change(np.fromfile(index, dtype=np.uint64)).tofile(index)

    return damage


def one_key(shard: Path) -> None:
    size = shard.stat().st_size
    write_shard(shard, [("k", {"json": {"text": text}}) for text in "ab"])
    with_index(lambda _: np.array([0, size], dtype=np.uint64))(shard)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_header, "no header at byte 1024 of the sample"),
        (with_index(lambda places: np.delete(places, 1)), "two samples, 'k0' and 'k1'"),
        (with_index(lambda places: places | 2**63), "bytes 9223372036854775808 to "),
        (one_key, "two parts 'json' of the sample 'k'"),
    ],
    ids=["header", "merged", "noise", "twice"],
)
def test_a_sample_is_never_read_as_another(tmp_path, damage, message):
    first = {"json": {"text": "a"}, "jpg": png()}
    rows = of_samples(tmp_path / "d", first, *({"json": {"text": each}} for each in "bc"))
    assert rows.read(0) == {"text": "a", "images": ["jpg"]}
    damage(rows.files[0])
    rows = EnergonRows(rows.folder, split="train")
    with pytest.raises(ValueError, match=rf"a\.tar:1: the shard cannot be read there .*{message}"):
        rows.read(0)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"shard_counts": {"a.tar": "1"}}, "shard a.tar has '1' samples"),
        ({"shard_counts": {"a.tar": True}}, "shard a.tar has True samples"),
        ({"shard_counts": {"a.tar": -1}}, "shard a.tar has -1 samples"),
        ({"shard_counts": {}}, "shard_counts is {}"),
        ({"shard_counts": ["a.tar"]}, "shard_counts is "),
        ({}, "shard_counts"),
        ({"shard_counts": {"../a.tar": 1}}, "'../a.tar' is not a path within"),
        ({"shard_counts": {"/tmp/a.tar": 1}}, "'/tmp/a.tar' is not a path within"),
    ],
)
def test_lists_of_shards_are_checked(tmp_path, info, message):
    folder = of_samples(tmp_path / "d", {"json": {"text": "a"}}).folder
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=f"cannot be read for the split None: .*{message}"):
        EnergonRows(folder, split=None)


def test_a_split_reaches_nothing_outside_the_folder(tmp_path):
    folder = of_samples(tmp_path / "d", {"json": {"text": "a"}}).folder
    for name in (".nv-meta/.info.json", ".nv-meta/split.yaml"):
        path = folder / name
        path.write_text(path.read_text().replace("a.tar", "../d/a.tar"))
    with pytest.raises(ValueError, match=r"'\.\./d/a\.tar' is not a path within"):
        EnergonRows(folder, split="train")


def test_check_reads_all_splits(demo, prepared, capsys):
    bad = check([str(prepared)], settings_of(demo / "processor"), seq_length=80, processes=2)
    assert bad == 0
    assert "80 rows" in capsys.readouterr().err


def test_without_the_package_one_sentence_names_the_extra(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.energon.epathlib", None)
    with pytest.raises(ValueError, match=r"pip install 'loongplug\[energon\]'"):
        EnergonRows(prepared, split="train")
