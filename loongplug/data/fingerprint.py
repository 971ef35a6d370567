"""What decides a run's place in its data: the rows, their order, and how they become tokens.

How many samples were consumed names the next one only while the stream of samples is the same.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from loongplug.data.blend import Source
from loongplug.data.energon import EnergonRows
from loongplug.data.folder_files import separate_template
from loongplug.data.processor import Processor

# Files up to this size are read whole. Of larger ones this much, so that every rank can afford
# to look at terabytes of rows before each start.
SAMPLED_BYTES = 16 * 2**20
BLOCK_BYTES = 64 * 2**10
_PROCESSOR_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
# Others of a tokenizer: a part of their own, since notes of older versions have none of them.
_TOKENIZER_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "additional_chat_templates/*.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model"),
)


def content_digest(*paths: Path, most: int | None = None, head: int = 0) -> str:
    """A digest of the size and content of a file, or of several as one, as 16 hexadecimal digits.

    Above ``most`` bytes (else SAMPLED_BYTES), the ``head`` and blocks at even distances are read,
    the first and the last among them: an edit between two that keeps the size does not show.
    """
    ends = list(accumulate(path.stat().st_size for path in paths))
    size = ends[-1]
    digest = hashlib.sha256(str(size).encode())
    most = SAMPLED_BYTES if most is None else most
    blocks, length = 1, size
    if size > most:
        digest.update(_read(paths, ends, start=0, length=min(head, size)))
        blocks, length = max(1, most // BLOCK_BYTES), min(most, BLOCK_BYTES)
    for block in range(blocks):
        start = (size - length) * block // max(1, blocks - 1)
        digest.update(_read(paths, ends, start=start, length=length))
    return digest.hexdigest()[:16]


def _read(paths: Sequence[Path], ends: Sequence[int], *, start: int, length: int) -> bytes:
    """A piece of what the files hold one behind the other; ``ends`` are their ends there."""
    found = bytearray()
    for number in range(bisect_right(ends, start), len(paths)):
        with paths[number].open("rb") as file:
            file.seek(start + len(found) - ends[number], os.SEEK_END)
            found += file.read(length - len(found))
        if len(found) == length:
            break
    return bytes(found)


def fingerprint(
    sources: Sequence[Source], processor: Processor, **settings: Any
) -> dict[str, dict[str, Any]]:
    """The stream of samples as plain data, by what the user would call its parts; data may move."""
    return {
        "rows": {
            f"file {number}": source_digest(source)
            for number, source in enumerate(sources, start=1)
        },
        "processor": processor_digest(processor.folder),
        "tokenizer": {
            str(file.relative_to(processor.folder)): content_digest(file)
            for pattern in _TOKENIZER_FILES
            for file in sorted(processor.folder.glob(pattern))
        },
        "settings": settings,
    }


def processor_digest(folder: Path) -> dict[str, str]:
    """The content of what turns rows into tokens and patches: tokenizer, template, processors."""
    files = [folder / name for name in _PROCESSOR_FILES]
    files = [*filter(Path.is_file, files), *filter(None, [separate_template(folder)])]
    return {file.name: content_digest(file) for file in files}


def source_digest(source: Source) -> dict[str, Any]:
    """Size and content; of an energon dataset, those of its shards, and its lists of them."""
    size = sum(file.stat().st_size for file in source.files)
    found = {"bytes": size, "digest": content_digest(*source.files)}
    if isinstance(source, EnergonRows):
        found |= {"samples": len(source), "lists": content_digest(*source.meta)}
    return found
