"""Export a model as a Hugging Face folder that ``transformers`` loads."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from loongplug.checkpoint.agreement import raise_together
from loongplug.checkpoint.hf_gather import is_writer, iterate_full_tensors
from loongplug.checkpoint.owned import owned_parameters
from loongplug.checkpoint.shard_writer import ShardWriter, written_here
from loongplug.models.qwen3_vl.config import Qwen3VLConfig
from loongplug.models.qwen3_vl.hf import hf_config, hf_mapping

MAX_FILE_BYTES = 5 * 1024**3

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_COPIED_FILES = (
    *_TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    *_IMAGE_PROCESSOR_FILES,
    "video_preprocessor_config.json",
)


def check_hf_export(folder: Path, *, config: Qwen3VLConfig, processor_folder: Path) -> None:
    """Refuse an export that cannot work; for the start of a run that exports at its end.

    No collectives.

    Raises:
        ValueError: ``folder`` holds something else than an earlier export, ``processor_folder``
            lacks a file, the tokenizer has no end token, or transformers cannot express the model.
    """
    hf_config(config)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder for the export.")
    if folder.is_dir() and any(folder.iterdir()) and not written_here(folder):
        raise ValueError(
            f"{folder} is not empty and no earlier export of LoongPlug, which alone it would "
            "replace; give another folder."
        )
    for names in (_TOKENIZER_FILES, _IMAGE_PROCESSOR_FILES):
        if not any((processor_folder / name).is_file() for name in names):
            raise ValueError(
                f"{processor_folder} has no {' or '.join(names)}, which the export copies; give "
                "the folder of the tokenizer and the image processor."
            )
    _end_and_pad_ids(processor_folder)


def save_hf_folder(
    model_chunks: Sequence[nn.Module],
    folder: Path,
    *,
    config: Qwen3VLConfig,
    processor_folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write weights, config, generation config, tokenizer and processor into ``folder``.

    Weights keep the parameters' dtype. The folder appears whole or not at all; an older export
    under that name is replaced. Memory on the writing rank: ``max_file_bytes`` and one tensor.

    Collective: the default group; all ranks return once the folder is complete.

    Raises:
        ValueError: on all ranks alike, before anything is gathered where that can be known.
    """
    error: Exception | None = None
    try:
        owned_parameters(model_chunks, hf_mapping(config))
        if is_writer(model_chunks):
            check_hf_export(folder, config=config, processor_folder=processor_folder)
    except Exception as caught:  # whatever it is, the other ranks are waiting
        error = caught
    raise_together(error)

    if is_writer(model_chunks):
        error = _write(
            model_chunks,
            folder,
            config=config,
            processor_folder=processor_folder,
            max_file_bytes=max_file_bytes,
        )
    else:
        for _ in iterate_full_tensors(model_chunks, config=config, what="weight"):
            raise AssertionError("only the writing rank gets tensors")
    raise_together(error)


def _write(
    model_chunks: Sequence[nn.Module],
    folder: Path,
    *,
    config: Qwen3VLConfig,
    processor_folder: Path,
    max_file_bytes: int,
) -> Exception | None:
    """Write the folder; an error (a full disk) is returned once all tensors were received."""
    tensors = iterate_full_tensors(model_chunks, config=config, what="weight")
    error: Exception | None = None
    try:
        with _replaced(folder) as building:
            writer = ShardWriter(building, max_bytes=max_file_bytes)
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.finish()
            dtype = next(model_chunks[0].parameters()).dtype
            _write_configs(building, config, dtype=dtype, processor_folder=processor_folder)
    except OSError as caught:
        error = ValueError(f"{folder} cannot be written ({caught}): make room, or give another.")
    except Exception as caught:
        error = caught
    for _ in tensors:  # the other ranks send what they have in any case
        pass
    return error


def _write_configs(
    folder: Path, config: Qwen3VLConfig, *, dtype: torch.dtype, processor_folder: Path
) -> None:
    from transformers import GenerationConfig

    exported = hf_config(config)
    exported.dtype = dtype
    exported.save_pretrained(folder)
    for name in _COPIED_FILES:
        source = processor_folder / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
    end, pad = _end_and_pad_ids(processor_folder)
    GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False).save_pretrained(folder)


def _end_and_pad_ids(processor_folder: Path) -> tuple[int, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(processor_folder), local_files_only=True)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if end is None:
        raise ValueError(
            f"The tokenizer in {processor_folder} names no eos_token, so an exported model would "
            "never end an answer; set it in tokenizer_config.json."
        )
    return end, end if pad is None else pad


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes ``folder``'s place when the context ends without error."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.new")
    before = folder.with_name(f".{folder.name}.old")
    _restore(folder, before)  # a run may have been killed here
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        yield building
        if folder.exists():
            folder.rename(before)
        building.rename(folder)
    except BaseException:
        _restore(folder, before)
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _restore(folder: Path, before: Path) -> None:
    """Put the older export back where only it is left."""
    if before.exists() and (not folder.exists() or not any(folder.iterdir())):
        shutil.rmtree(folder, ignore_errors=True)
        before.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
