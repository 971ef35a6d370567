"""The JSON files of a model's folder that say how media are processed, and Qwen's marks of them."""

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

COMBINED_FILE = "processor_config.json"  # as transformers 5 writes it: a section each
IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
MODEL_FILE = "config.json"

# The special tokens of Qwen's vision-language models, by the config's fields for their ids.
QWEN_VISION_TOKENS = MappingProxyType(
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
)


def read_json(path: Path) -> dict[str, Any]:
    """The file's content, nothing for a file that is not there."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again.") from error
    return content if isinstance(content, dict) else {}


def whole_number(value: Any, name: str) -> int:
    """A number above 0; InternVL has one of the height, and the same of the width."""
    alike = isinstance(value, list) and value and value.count(value[0]) == len(value)
    number = value[0] if alike else value
    if type(number) is not int or number < 1:
        raise ValueError(f"{name} is {value!r:.40}: expected a whole number above 0")
    return number


def separate_template(folder: Path) -> Path | None:
    """The file that older processors have the chat template in, where the tokenizer has none."""
    file, newer = folder / "chat_template.json", folder / "chat_template.jinja"
    config = read_json(folder / "tokenizer_config.json")
    if newer.is_file() or config.get("chat_template") or not file.is_file():
        return None
    return file
