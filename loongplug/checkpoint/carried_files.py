"""What a Hugging Face folder has beside the weights, and how it is carried along."""

import shutil
from pathlib import Path

from loongplug.data.processor import IMAGE_PROCESSOR_FILES, TOKENIZER_FILES

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
_CARRIED = (
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    *IMAGE_PROCESSOR_FILES,
    "video_preprocessor_config.json",
    GENERATION_CONFIG_FILE,
    CONFIG_FILE,
)
# Where a converted checkpoint keeps them, so that it can be converted back by itself.
CARRIED_FOLDER = "hugging_face"


def carried_names(source: Path) -> list[str]:
    """The files of ``source`` that are carried along."""
    return [name for name in _CARRIED if (source / name).is_file()]


def copy_carried_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, processor and the configs as they are."""
    target.mkdir(parents=True, exist_ok=True)
    for name in carried_names(source):
        shutil.copyfile(source / name, target / name)
