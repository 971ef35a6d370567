"""Small datasets for tests, prepared by megatron-energon's own code."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Parts = dict[str, bytes | dict[str, Any] | list[Any]]


def write_shard(path: Path, samples: Sequence[tuple[str, Parts]]) -> None:
    """A tar file with the parts of each sample (key, parts), in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, parts in samples:
            for part, content in parts.items():
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                member = tarfile.TarInfo(f"{key}.{part}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def prepare(folder: Path, splits: dict[str, str], *, exclude: Sequence[str] = ()) -> Path:
    """Index the shards of ``folder``; ``splits`` are names and patterns of their shards."""
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    shards = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tar"))
    WebdatasetPreparator.prepare_dataset(
        folder, shards, split_parts_patterns=list(splits.items()), workers=1
    )
    if exclude:
        path = folder / ".nv-meta" / "split.yaml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith("exclude")]
        path.write_text("\n".join([*lines, "exclude:", *(f"- {each}" for each in exclude), ""]))
    return folder


def of_demo(demo: Path, folder: Path, *, shards: int, validation: int = 0) -> Path:
    """The demo's training rows as shards, and as many of its test rows as validation shard.

    Every second sample names its images; the others leave them to their order.
    """
    lines = (demo / "train.jsonl").read_text().splitlines()
    each = len(lines) // shards
    for shard in range(shards):
        rows = [json.loads(line) for line in lines[shard * each : (shard + 1) * each]]
        samples = [
            (f"{shard}-{n:04d}", demo_parts(demo, row, named=n % 2 == 0))
            for n, row in enumerate(rows)
        ]
        write_shard(folder / "train" / f"shard_{shard}.tar", samples)
    if validation:
        rows = [json.loads(line) for line in (demo / "test.jsonl").read_text().splitlines()]
        samples = [(f"v-{n}", demo_parts(demo, row, named=True)) for n, row in enumerate(rows)]
        write_shard(folder / "val" / "shard_0.tar", samples[:validation])
    splits = {"train": "train/.*"} | ({"val": "val/.*"} if validation else {})
    return prepare(folder, splits)


def demo_parts(demo: Path, row: dict[str, Any], *, named: bool) -> Parts:
    """A row of the demo as a sample's parts."""
    parts: Parts = {}
    content = row["messages"][0]["content"]
    images = [part for part in content if part["type"] == "image"]
    for number, image in enumerate(images):
        name = f"{number}.png"
        parts[name] = (demo / image["image"]).read_bytes()
        if named:
            image["image"] = name
        else:
            del image["image"]
    return {"json": row, **parts}
