"""Rows of a dataset that megatron-energon has prepared: tar shards with an index beside each.

Its package, of the extra ``energon``, reads the lists of shards and splits; samples are read here.
Nothing that a dataset's folder or a shard names is imported or unpickled.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.media_files import TarMember, open_media_file, require_version, version
from loongplug.data.row_files import parse_row_json
from loongplug.data.sample import told

_META = ".nv-meta"
_META_STEP = re.compile("__.+__", re.DOTALL)  # of a member's path, which is then no sample's
_CHUNK = 65_536
_MOST_SAMPLES = 2**32  # of a shard: they are counted in 32 bits
_MEDIA = {
    "image": ("bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
    "video": ("avi", "mkv", "mov", "mp4", "webm"),
    "audio": ("aac", "aiff", "flac", "m4a", "mp3", "oga", "ogg", "opus", "wav", "wma"),
}
_PICKLED = ("pickle", "pkl", "pt", "pth", "pyd")


def is_energon(path: Path) -> bool:
    """Whether there is a prepared dataset at ``path``."""
    return (path / _META).is_dir()


@dataclass(frozen=True)
class TarSample:
    """The parts of a sample by what follows its key in their names: ``jpg``, ``0.png``."""

    key: str
    parts: dict[str, TarMember]
    where: str

    def __truediv__(self, name: str) -> TarMember:
        """A part by its own name, its file's name, or its path in the shard."""
        for part, member in self.parts.items():
            if name in (part, member.name, member.name.rpartition("/")[2]):
                return member
        raise ValueError(
            f"{self.where}: no part {name!r} in the sample {self.key!r}: it has"
            f" {', '.join(self.parts)}. Give a part's name or its file's name, or leave media out"
            " of the JSON to have them taken in their order."
        )

    def named(self, *extensions: str) -> list[str]:
        """The parts with one of these extensions, in the shard's order."""
        return [part for part in self.parts if part.rpartition(".")[2].lower() in extensions]


class EnergonRows:
    """The samples of a prepared dataset, by index: in the order of the shards and within them.

    A sample's row is its part ``json``: a row of any format, or only its list of turns or messages.
    Of media that the row does not name, the sample's parts are taken in their order.
    """

    def __init__(self, folder: Path, *, split: str | None, access: RowAccess = ANY_ROW) -> None:
        """``split`` is None for all; ValueError without the package, or a prepared dataset."""
        self.folder = folder
        self.split = split
        self.access = access
        shards, excluded = _shards(folder, split=split)
        self.files = tuple(folder / name for name, _ in shards)
        for shard in self.files:
            if shard.suffix != ".tar":
                raise ValueError(
                    f"{shard} is compressed: only plain tar shards can be read by place."
                )
            for path in (shard, _index_of(shard)):
                if not path.is_file():
                    raise ValueError(f"{path} is missing: prepare the dataset again.")
        self._versions = {shard: version(shard) for shard in self.files}
        counts = [count for _, count in shards]
        self._shard = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)  # [rows]
        numbers = [np.arange(count, dtype=np.uint32) for count in counts]
        self._sample = np.concatenate(numbers)  # [rows]: number within the shard
        self._indices: dict[int, NDArray[np.uint64]] = {}  # by shard, memory-mapped
        self._latest: tuple[int, TarSample] | None = None  # a row's media follow the row
        self._leave_out(excluded)
        if not len(self):
            raise ValueError(f"{folder} has no samples in its split {split}: choose another.")

    @property
    def meta(self) -> list[Path]:
        """The files that say which shards and samples there are."""
        names = (".info.json", ".info.yaml", "split.yaml", "split.json")
        return [path for name in names if (path := self.folder / _META / name).is_file()]

    def __len__(self) -> int:
        return len(self._shard)

    def where(self, index: int) -> str:
        return f"{self.files[self._shard[index]]}:{int(self._sample[index]) + 1}"

    def media_root(self, index: int) -> TarSample:
        if self._latest is None or self._latest[0] != index:
            self._latest = index, self._open(index)
        return self._latest[1]

    def read(self, index: int) -> dict[str, Any]:
        """The row; ValueError with its place when it is none, or for parts that are refused."""
        shard = self.files[self._shard[index]]
        require_version(shard, self._versions[shard])
        sample, where = self.media_root(index), self.where(index)
        if pickled := sample.named(*_PICKLED):
            raise ValueError(
                f"{where}: the parts {', '.join(pickled)} are pickled, and unpickling runs what"
                " they say: prepare the dataset again without them."
            )
        part = _row_part(sample)
        self.access.require_size(part.size, where=where)
        with open_media_file(part) as file, told(f"{where}: the part json: ", "."):
            row = parse_row_json(file.read())
        if isinstance(row, list):
            turns = bool(row) and isinstance(row[0], dict) and "from" in row[0]
            row = {"conversations" if turns else "messages": row}
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: a JSON {type(row).__name__} where an object or a list of turns was"
                ' expected: {"messages": [...]}.'
            )
        return _with_media_in_order(self.access.by_our_keys(row, where=where), sample)

    def _open(self, index: int) -> TarSample:
        where, path = self.where(index), self.files[self._shard[index]]
        start, end = self._span(int(self._shard[index]), int(self._sample[index]))
        extent = TarMember(path, "", start, end - start)
        parts: dict[str, TarMember] = {}
        key: str | None = None
        try:
            most = path.stat().st_size
            if not start < end <= most:
                raise tarfile.ReadError(f"bytes {start} to {end} by its index, but it has {most}")
            for name, offset, size in _members(extent):
                matched = _split_name(name)
                if matched is None:
                    continue
                if key not in (None, matched[0]):
                    raise tarfile.ReadError(f"two samples, {key!r} and {matched[0]!r}")
                key, part = matched
                if part in parts:
                    raise tarfile.ReadError(f"two parts {part!r} of the sample {key!r}")
                parts[part] = TarMember(path, name, start + offset, size)
        # ValueError: of numbers and names in headers
        except (OSError, ValueError, tarfile.TarError) as error:
            raise ValueError(
                f"{where}: the shard cannot be read there ({error}): prepare the dataset again."
            ) from error
        return TarSample(key or "", parts, where)

    def _span(self, shard: int, sample: int) -> tuple[int, int]:
        """Where a sample's bytes are in its shard."""
        path = _index_of(self.files[shard])
        if shard not in self._indices:
            try:
                self._indices[shard] = np.memmap(path, dtype=np.uint64, mode="r")
            except (OSError, ValueError) as error:
                raise ValueError(f"The index {path} cannot be read ({error}).") from error
        index = self._indices[shard]
        if sample + 1 >= len(index):
            raise ValueError(f"{path} ends before sample {sample + 1}: prepare the dataset again.")
        return int(index[sample]), int(index[sample + 1])

    def _leave_out(self, excluded: frozenset[str]) -> None:
        """Drop the samples ``shard/key`` that the split excludes; reads their shards' headers."""
        if not excluded:
            return
        kept = np.ones(len(self), dtype=np.bool_)
        for shard, path in enumerate(self.files):
            name = path.relative_to(self.folder).as_posix()
            if any(each.startswith(f"{name}/") for each in excluded):
                for row in np.flatnonzero(self._shard == shard).tolist():
                    kept[row] = f"{name}/{self._open(row).key}" not in excluded
        self._shard, self._sample = self._shard[kept], self._sample[kept]


def _shards(folder: Path, *, split: str | None) -> tuple[list[tuple[str, int]], frozenset[str]]:
    """Shards with their numbers of samples, and the samples to leave out."""
    try:
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.metadata import (
            WebdatasetMeta,
            check_dataset_info_present,
            get_dataset_info,
        )
    except ImportError as error:
        raise ValueError(
            f"{folder} is read by megatron-energon, which is not installed ({error}): pip install"
            " 'loongplug[energon]'."
        ) from error
    path = EPath(str(folder.absolute()))
    if not check_dataset_info_present(path):
        raise ValueError(
            f"{folder} is not a prepared dataset of shards: run energon prepare on it, or give the"
            " JSONL file."
        )
    try:
        if split is None:
            return _listed(get_dataset_info(path)["shard_counts"]), frozenset()
        meta = WebdatasetMeta.from_config(path, split_part=split)
        counts = _listed({shard.name: shard.count for shard in meta.shards})
        return counts, frozenset(meta.sample_excludes)
    # What it raises is any of its parsers' own kinds.
    except Exception as error:
        raise ValueError(
            f"{folder}/{_META} cannot be read for the split {split}:"
            f" {type(error).__name__}: {error}"
        ) from error


def _listed(counts: Any) -> list[tuple[str, int]]:
    """The shards and their numbers of samples; ValueError for what can be none."""
    if not isinstance(counts, dict) or not counts:
        raise ValueError(f"shard_counts is {counts!r}, expected the number of samples by shard")
    for name, count in counts.items():
        path = PurePosixPath(str(name))
        if not isinstance(name, str) or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"shard {name!r} is not a path within the dataset's folder")
        if type(count) is not int or not 0 <= count < _MOST_SAMPLES:
            raise ValueError(f"shard {name} has {count!r} samples, expected a number of them")
    return list(counts.items())


def _index_of(shard: Path) -> Path:
    return shard.with_suffix(".tar.idx")


def _members(extent: TarMember) -> Iterator[tuple[str, int, int]]:
    """Name, place and size of the plain files in this piece of an archive; reads headers."""
    with open_media_file(extent) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isreg() and not member.issparse():
                if not 0 <= member.size <= extent.size - member.offset_data:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                yield member.name, member.offset_data, member.size
        # Of a header that is damaged, only the first is an error to tarfile; it stops at others.
        file.seek(archive.offset)
        while rest := file.read(_CHUNK):
            if rest.strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {archive.offset} of the sample")


def _split_name(name: str) -> tuple[str, str] | None:
    """Key and part, as energon tells them apart: at the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    stem, dot, part = file.partition(".")
    if not stem or not dot or any(_META_STEP.fullmatch(step) for step in name.split("/")):
        return None
    return f"{folder}{slash}{stem}", part


def _row_part(sample: TarSample) -> TarMember:
    """The part that holds the row."""
    found = sample.named("json")
    if "json" not in found and len(found) != 1:
        raise ValueError(
            f"{sample.where}: the sample {sample.key!r} has {len(found)} JSON parts among"
            f" {', '.join(sample.parts) or 'none'}: expected one, with its messages."
        )
    return sample.parts["json" if "json" in found else found[0]]


def _with_media_in_order(row: dict[str, Any], sample: TarSample) -> dict[str, Any]:
    """The row with the sample's media where it has markers or parts for them, but no names."""
    row = dict(row)
    for kind, extensions in _MEDIA.items():
        names = sample.named(*extensions)
        parts = list(_content_parts(row, kind))
        places = [part for part in parts if part["type"] == kind and kind not in part]
        if row.get(kind) or row.get(f"{kind}s"):
            continue  # the row names them itself
        if places and len(places) != len(names):
            raise ValueError(
                f"{sample.where}: {len(places)} places for {kind}s without a name, but the sample"
                f" has {len(names)} {kind} parts: name them, or write one place for each."
            )
        for part, name in zip(places, names, strict=False):
            part[kind] = name
        if names and not parts and (kind != "image" or not _frames_named(row)):
            row[f"{kind}s"] = names
    return row


def _content_parts(row: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """The parts of this kind in the messages' contents."""
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and str(part.get("type")).removesuffix("_url") == kind:
                yield part


def _frames_named(row: dict[str, Any]) -> bool:
    """Whether images are spoken for as the frames of a video."""
    beside = row.get("videos")
    named = list(beside) if isinstance(beside, list) else []
    named += [part.get("video") for part in _content_parts(row, "video")]
    return any(isinstance(video, list) for video in named)
