"""The rows and processors that ``verify`` makes for itself, of nothing but the wheel."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from loongplug.training.arguments import parse_arguments
from loongplug.training.datasets import DatasetProvider
from loongplug.training.provider import engine_of
from loongplug.verify.forked_runs import plan_runs
from loongplug.verify.plan import SAMPLES, Request
from loongplug.verify.tiny_rows import write_rows

# Of each kind of processor.
MODELS = (
    *("qwen3_vl_tiny", "qwen2_5_vl_tiny", "llava_tiny", "internvl_tiny", "qwen2_audio_tiny"),
    "qwen2_5_omni_tiny",
)


@pytest.mark.parametrize("name", MODELS)
def test_the_longest_row_just_fits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that media lie in several parts of a split sequence, and no row is too long."""
    for package in ("sklearn", "espeakng_loader", "digits"):
        monkeypatch.setitem(sys.modules, package, None)  # none of them is installed
    flags = ("--device", "cpu", "--model-name", name)
    plan = plan_runs(Request(flags=flags, scale="tiny"), folder=tmp_path)
    parsed = parse_arguments(plan.layout, verified=True)
    data = DatasetProvider(parsed.args, parsed.model, engine=engine_of(parsed.args, parsed.model))
    rows = [data.train[number] for number in range(SAMPLES)]
    assert max(len(row.input_ids) for row in rows) == parsed.args.seq_length
    unknown = data.train.processor.tokenizer.unk_token_id
    assert not any(unknown in row.input_ids for row in rows)


@pytest.mark.quick
def test_rows_are_varied_and_always_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same")]
    for folder in folders:
        write_rows(folder, samples=SAMPLES, media=["image", "audio"])
    one, same = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
        for folder in folders
    )
    assert one == same
    media = [path for path in one if path.suffix in (".png", ".wav")]
    assert len({one[path] for path in media}) == len(media)  # no two are alike
    rows = [json.loads(line) for line in one[Path("train.jsonl")].splitlines()]
    assert {len(row["messages"]) for row in rows} == {2, 4}
    contents = [[message["content"] for message in row["messages"][::2]] for row in rows]
    kinds = [{part["type"] for content in each for part in content} for each in contents]
    assert {*map(frozenset, kinds)} == {frozenset(("text",)), frozenset(("audio", "image", "text"))}
    sizes = {Image.open(folders[0] / path).size for path in media if path.suffix == ".png"}
    assert sizes == {(32, 32), (64, 32), (32, 64), (64, 64)}
