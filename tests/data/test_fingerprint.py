"""What a fingerprint of the data notices."""

import shutil
import sys
from pathlib import Path

import pytest

from loongplug.data import fingerprint as module
from loongplug.data.fingerprint import content_digest, fingerprint
from loongplug.data.processor_folder import load_processor
from loongplug.data.row_files import JsonlIndex
from loongplug.data.video import VideoProcessor, video_style_of

pytestmark = pytest.mark.quick


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"row": {number}}}\n' for number in range(100)))
    return path


def test_any_byte_of_a_small_file_counts(rows):
    before = content_digest(rows)
    content = bytearray(rows.read_bytes())
    for place in (0, len(content) // 2, len(content) - 2):
        changed = bytearray(content)
        changed[place] ^= 1
        rows.write_bytes(changed)
        assert content_digest(rows) != before
    rows.write_bytes(content)
    assert content_digest(rows) == before


def test_of_a_large_file_size_and_blocks_count(rows, monkeypatch):
    monkeypatch.setattr(module, "SAMPLED_BYTES", 256)
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    content = rows.read_bytes()
    before = content_digest(rows)
    changes = {
        "longer": content + b" ",
        "first": b"[" + content[1:],
        "last": content[:-1] + b" ",
        "swapped halves": content[len(content) // 2 :] + content[: len(content) // 2],
    }
    for name, changed in changes.items():
        rows.write_bytes(changed)
        assert content_digest(rows) != before, name
    # Only so much is read: a byte between two blocks is not seen.
    unread = (len(content) - 64) // 3 - 10
    rows.write_bytes(content[:unread] + b"?" + content[unread + 1 :])
    assert content_digest(rows) == before


@pytest.mark.parametrize("sampled", [2**20, 256])
def test_several_files_count_as_one(rows, monkeypatch, sampled):
    monkeypatch.setattr(module, "SAMPLED_BYTES", sampled)
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    content = rows.read_bytes()
    parts = [rows.with_name(f"{number}") for number in range(4)]
    for part, piece in zip(
        parts, (content[:700], b"", content[700:730], content[730:]), strict=True
    ):
        part.write_bytes(piece)
    assert content_digest(*parts) == content_digest(rows)
    assert content_digest(*parts[::-1]) != content_digest(rows)


def test_a_moved_file_is_the_same_and_other_settings_are_not(rows, tmp_path, processor):
    before = fingerprint([JsonlIndex(rows)], processor, seed=1)
    moved = rows.rename(tmp_path / "moved.jsonl")
    assert fingerprint([JsonlIndex(moved)], processor, seed=1) == before
    assert fingerprint([JsonlIndex(moved)], processor, seed=2) != before
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    both = [JsonlIndex(moved), JsonlIndex(other)]
    assert fingerprint(both, processor) != fingerprint(both[::-1], processor)


def test_the_head_of_a_large_file_counts(rows, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    content = rows.read_bytes()
    unread = (len(content) - 64) // 3 - 10  # between two blocks
    before = [content_digest(rows, most=256, head=head) for head in (0, unread + 1)]
    rows.write_bytes(content[:unread] + b"?" + content[unread + 1 :])
    after = [content_digest(rows, most=256, head=head) for head in (0, unread + 1)]
    assert [first == second for first, second in zip(before, after, strict=True)] == [True, False]
    assert content_digest(rows, most=8) != content_digest(rows, most=16)  # less than a block


def test_every_file_that_a_processor_reads_counts(tmp_path, processor):
    """But ``config.json``, which is the model's; Python tells of what is opened."""
    folder = tmp_path / "processor"
    shutil.copytree(processor.folder, folder)
    more = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "audio_tokenizer.json")
    for name in (*more, "generation_config.json", "adapter_config.json", "processor_config.json"):
        (folder / name).write_text("{}")
    for name in ("merges.txt", "vocab.txt", "tokenizer.model", "README.md"):
        (folder / name).write_text("")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ tools }}")
    opened: set[str] = set()

    def hook(event: str, values: tuple[object, ...]) -> None:
        if event == "open" and str(values[0]).startswith(f"{folder}/"):
            opened.add(str(values[0]).removeprefix(f"{folder}/"))

    sys.addaudithook(hook)
    found = load_processor(folder)
    VideoProcessor(found, video_style_of(found.folder))
    assert "additional_chat_templates/tools.jinja" in opened
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    before = fingerprint([JsonlIndex(rows)], found)
    known = {*before["processor"], *before["tokenizer"]}
    assert opened - {"config.json"} <= known
    assert {"merges.txt", "vocab.json", "tokenizer.model", *more[:2]} <= known
    (templates / "tools.jinja").write_text("{{ tools | tojson }}")
    assert fingerprint([JsonlIndex(rows)], found) != before
