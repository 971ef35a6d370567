"""Command lines for tests, with the files they name."""

import json
from pathlib import Path

TOKENS = {
    "<|image_pad|>": 5,
    "<|video_pad|>": 6,
    "<|vision_start|>": 3,
    "<|vision_end|>": 4,
}


def write_tokenizer(folder: Path, *, size: int = 100, tokens: dict[str, int] | None = None) -> Path:
    """A folder with the parts of a tokenizer.json that the arguments look at."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "added_tokens": [{"id": id_, "content": text} for text, id_ in (tokens or TOKENS).items()],
        "model": {"vocab": {f"word{index}": index for index in range(size)}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def command_line(folder: Path, *more: str, model: str = "qwen3_vl_tiny") -> list[str]:
    """A valid command line for one rank, followed by ``more`` (where the last value wins)."""
    data = folder / "train.jsonl"
    if not data.exists():
        data.write_text("{}\n")
        write_tokenizer(folder / "tokenizer")
    return [
        *("--device", "cpu", "--model-name", model, "--training-phase", "sft"),
        *("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
        *("--lr", "1e-3", "--train-iters", "10"),
        *("--tokenizer-model", str(folder / "tokenizer"), "--train-data-path", str(data)),
        *more,
    ]
