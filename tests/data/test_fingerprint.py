"""What a fingerprint of the data notices."""

from pathlib import Path

import pytest

from loongplug.data import fingerprint as module
from loongplug.data.fingerprint import content_digest, fingerprint
from loongplug.data.jsonl import JsonlIndex
from loongplug.data.processor import Processor, load_processor

pytestmark = pytest.mark.quick


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"row": {number}}}\n' for number in range(100)))
    return path


def test_any_byte_of_a_small_file_counts(rows: Path) -> None:
    before = content_digest(rows)
    content = bytearray(rows.read_bytes())
    for place in (0, len(content) // 2, len(content) - 2):
        changed = bytearray(content)
        changed[place] ^= 1
        rows.write_bytes(changed)
        assert content_digest(rows) != before
    rows.write_bytes(content)
    assert content_digest(rows) == before


def test_of_a_large_file_size_and_blocks_count(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_several_files_count_as_one(
    rows: Path, monkeypatch: pytest.MonkeyPatch, sampled: int
) -> None:
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


def test_a_moved_file_is_the_same_and_other_settings_are_not(
    rows: Path, tmp_path: Path, processor: Processor
) -> None:
    before = fingerprint([JsonlIndex(rows)], processor, seed=1)
    moved = rows.rename(tmp_path / "moved.jsonl")
    assert fingerprint([JsonlIndex(moved)], processor, seed=1) == before
    assert fingerprint([JsonlIndex(moved)], processor, seed=2) != before
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    both = [JsonlIndex(moved), JsonlIndex(other)]
    assert fingerprint(both, processor) != fingerprint(both[::-1], processor)


def test_another_template_is_another_stream(
    rows: Path, tmp_path: Path, processor: Processor
) -> None:
    folder = tmp_path / "processor"
    folder.mkdir()
    for file in processor.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    copied = load_processor(folder)
    assert fingerprint([JsonlIndex(rows)], copied) == fingerprint([JsonlIndex(rows)], processor)
    template = folder / "chat_template.jinja"
    assert template.is_file()
    template.write_text(template.read_text() + "\n")
    assert fingerprint([JsonlIndex(rows)], copied) != fingerprint([JsonlIndex(rows)], processor)
