"""Export a model as a Hugging Face folder that ``transformers`` loads."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from loongplug.checkpoint.agreement import raise_together
from loongplug.checkpoint.hf_gather import WholeTensors
from loongplug.checkpoint.holders import own_rank
from loongplug.checkpoint.replaced_folder import replaced_folder
from loongplug.checkpoint.tensor_files import (
    PlannedFile,
    PlannedTensor,
    TensorFileWriter,
    plan_files,
    write_index,
    written_here,
)
from loongplug.models.hf_mapping import Bundle
from loongplug.models.hf_model import HuggingFaceModel, hf_config

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


def check_hf_export(folder: Path, *, model: HuggingFaceModel, processor_folder: Path) -> None:
    """Refuse an export that cannot work; for the start of a run that exports at its end.

    No collectives.

    Raises:
        ValueError: ``folder`` holds something else than an earlier export, ``processor_folder``
            lacks a file, the tokenizer has no end token, or transformers cannot express the model.
    """
    hf_config(model)
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
    model: HuggingFaceModel,
    processor_folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write weights, config, generation config, tokenizer and processor into ``folder``.

    Weights keep the parameters' dtype; the files are the same, to the byte, from any layout. A
    file is written by the rank that has the beginning of it, tensor by tensor as they are put
    together: memory beside the parameters is that of one tensor (or of those that one fused
    parameter gives). The folder appears whole or not at all; an older export under that name is
    replaced. All ranks must see the same folder.

    Collective: the default group; all ranks return once the folder is complete.

    Raises:
        ValueError: on all ranks alike, before anything is gathered where that can be known.
    """
    error: Exception | None = None
    try:
        if own_rank() == 0:
            check_hf_export(folder, model=model, processor_folder=processor_folder)
    except Exception as caught:  # whatever it is, the other ranks are waiting
        error = caught
    raise_together(error)
    tensors = WholeTensors(model_chunks, model.mapping)
    files = plan_files(
        (_planned(bundle, tensors.dtype(bundle)) for bundle in tensors.bundles),
        max_bytes=max_file_bytes,
    )
    with replaced_folder(folder, rank=own_rank()) as building:
        error = _write_files(building, files, tensors)
        raise_together(error)
        if own_rank() == 0:
            error = _finish(
                building, files, model=model, tensors=tensors, processor_folder=processor_folder
            )
        raise_together(error)


def _planned(bundle: Bundle, dtype: torch.dtype) -> list[PlannedTensor]:
    return [PlannedTensor(source.name, source.shape, dtype) for source in bundle.sources]


def _write_files(
    folder: Path, files: Sequence[PlannedFile], tensors: WholeTensors
) -> Exception | None:
    """Write this rank's files; an error (a full disk) comes back once all has been received."""
    file_of = {tensor.name: file for file in files for tensor in file.tensors}
    writers: dict[str, int] = {}
    for bundle in tensors.bundles:
        file = file_of[bundle.sources[0].name]
        writers.setdefault(file.name, tensors.first_holder(bundle))
    error: Exception | None = None
    with ExitStack() as stack:
        current: tuple[str, TensorFileWriter] | None = None
        for bundle, whole in tensors.collect(
            lambda bundle: writers[file_of[bundle.sources[0].name].name]
        ):
            if error is not None:  # the other ranks send what they have in any case
                continue
            file = file_of[bundle.sources[0].name]
            try:
                if current is None or current[0] != file.name:
                    stack.close()
                    current = (file.name, stack.enter_context(TensorFileWriter(folder, file)))
                for source, tensor in zip(bundle.sources, whole, strict=True):
                    current[1].add(source.name, tensor)
            except OSError as caught:
                error = ValueError(
                    f"{folder} cannot be written ({caught}): make room, or give another folder."
                )
            except Exception as caught:
                error = caught
    return error


def _finish(
    folder: Path,
    files: Sequence[PlannedFile],
    *,
    model: HuggingFaceModel,
    tensors: WholeTensors,
    processor_folder: Path,
) -> Exception | None:
    try:
        write_index(folder, files)
        dtype = tensors.dtype(tensors.bundles[0])
        _write_configs(folder, model, dtype=dtype, processor_folder=processor_folder)
    except OSError as caught:
        return ValueError(
            f"{folder} cannot be written ({caught}): make room, or give another folder."
        )
    except Exception as caught:
        return caught
    return None


def _write_configs(
    folder: Path, model: HuggingFaceModel, *, dtype: torch.dtype, processor_folder: Path
) -> None:
    from transformers import GenerationConfig

    exported = hf_config(model)
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
