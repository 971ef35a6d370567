"""What a run's place in its data rests on: the rows, their order, and how they become tokens.

A checkpoint says how many samples were consumed. That names the next sample only while the
stream of samples is the same, which two equal fingerprints show.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loongplug.data.processor import Processor

# Files up to this size are read whole. Of larger ones this much, so that every rank can afford
# to look at terabytes of rows before each start.
SAMPLED_BYTES = 16 * 2**20
BLOCK_BYTES = 64 * 2**10

_PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def content_digest(path: Path) -> str:
    """A digest of the file's size and content, as 16 hexadecimal digits.

    Of a file above SAMPLED_BYTES, blocks at even distances are read, the first and the last
    among them. What adds, drops or moves rows shows; an edit that keeps the file's size and lies
    between two blocks does not, and neither does it change which rows there are.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= SAMPLED_BYTES:
            digest.update(file.read())
        else:
            blocks = SAMPLED_BYTES // BLOCK_BYTES
            for block in range(blocks):
                file.seek((size - BLOCK_BYTES) * block // (blocks - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def fingerprint(
    files: Sequence[Path], processor: Processor, **settings: Any
) -> dict[str, dict[str, Any]]:
    """The stream of samples as plain data, by what the user would call its parts.

    ``files`` hold the rows. Paths are not part of it: data may move. ``settings`` are what else
    decides on the stream: lengths, seeds, weights, flags of the templates.
    """
    return {
        "rows": {
            f"file {number}": {
                "bytes": path.stat().st_size,
                "digest": content_digest(path),
            }
            for number, path in enumerate(files, start=1)
        },
        "processor": {
            name: content_digest(processor.folder / name)
            for name in _PROCESSOR_FILES
            if (processor.folder / name).is_file()
        },
        "settings": settings,
    }
