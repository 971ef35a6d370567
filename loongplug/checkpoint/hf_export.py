"""Export a model as a Hugging Face folder that ``transformers`` loads."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.checkpoint.common_errors import together
from loongplug.checkpoint.export_folder import EXPORT_LIST, check_export_folder, new_export
from loongplug.checkpoint.hf_gather import (
    OnBytes,
    WeightOf,
    WholeTensors,
    ignore_bytes,
    loaded_weight,
)
from loongplug.checkpoint.parameter_holders import own_rank
from loongplug.checkpoint.safetensors_folder import (
    PlannedFile,
    PlannedTensor,
    new_tensor_file,
    plan_files,
    write_index,
)
from loongplug.data.processor_folder import IMAGE_PROCESSOR_FILES, TOKENIZER_FILES
from loongplug.models.family import HuggingFaceModel, check_all_is_read
from loongplug.models.hf_config import hf_config, hf_config_differences
from loongplug.models.hf_mapping import Bundle, Source

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# What transformers reads for tokenizer, processors and configs.
_USUAL = (
    *(*TOKENIZER_FILES, *IMAGE_PROCESSOR_FILES, GENERATION_CONFIG_FILE, CONFIG_FILE),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "video_preprocessor_config.json"),
)
# Weights and what belongs to them, code, what is packed, notes of ours, and hidden files.
_NOT_CARRIED = re.compile(
    r"\..*|loongplug_.*|adapter_config\.json|.*\.index\.json|.*\.(safetensors|bin|pth?|ckpt|h5|msgpack"
    r"|gguf|ggml|onnx(_data)?|pb|tflite|np[yz]|pkl|pickle|joblib|distcp|nemo|tar|zip|gz|pyc?|so|dll"
    r"|sh|bat|js|c|cc|cpp|h|cu|ipynb|jar|exe|whl)",
    re.IGNORECASE,
)

MAX_FILE_BYTES = 5 * 1024**3
_KIND = "model"


def check_hf_export(
    folder: Path,
    *,
    model: HuggingFaceModel,
    processor_folder: Path,
) -> None:
    """Refuse an export that cannot work; for the start of a run that exports at its end.

    For one rank; no collectives.
    """
    hf_config(model)
    check_all_is_read(model)
    check_export_folder(folder, kind=_KIND)
    for names in (TOKENIZER_FILES, IMAGE_PROCESSOR_FILES):
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
    weights_folder: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: OnBytes = ignore_bytes,
    weight_of: WeightOf = loaded_weight,
) -> None:
    """Write weights, configs and what :func:`carried_files` finds into ``folder``.

    Weights keep the parameters' dtype; the files are the same, to the byte, from any layout. A
    file is written by the rank that has the beginning of it, tensor by tensor as they are put
    together: memory beside the parameters is that of one tensor and a slice of it. All ranks must
    see the same folder, and return once it is complete. ``weight_of`` gives a parameter's values
    where they are not in it. Collective: the default group. Raises ValueError on all ranks alike,
    before anything is gathered where that can be known.
    """
    with together():
        if own_rank() == 0:
            check_hf_export(folder, model=model, processor_folder=processor_folder)
    tensors = WholeTensors(model_chunks, model.mapping, weight_of=weight_of)
    files = plan_files(
        (
            [
                PlannedTensor(source.name, source.shape, tensors.dtype(bundle))
                for source in bundle.sources
            ]
            for bundle in tensors.bundles
        ),
        max_bytes=max_file_bytes,
    )
    dtype = usual_dtype({tensor.name: tensor.dtype for file in files for tensor in file.tensors})
    with new_export(folder, kind=_KIND) as new:
        write_files(
            new,
            files,
            tensors,
            target=folder,
            names=lambda bundle, source: (source.name,),
            rank_of=tensors.first_holder,
            on_bytes=on_bytes,
        )
        with together(folder):
            if own_rank() == 0:
                write_index(new, files)
                copy_carried_files(new, processor_folder, weights_folder)
                _write_configs(new, model, dtype=dtype, processor_folder=processor_folder)


def write_files(
    folder: Path,
    files: Sequence[PlannedFile],
    tensors: WholeTensors,
    *,
    target: Path,
    names: Callable[[Bundle, Source], Sequence[str]],
    rank_of: Callable[[Bundle], int],
    changed: Callable[[Source, Tensor], Tensor] = lambda _, tensor: tensor,
    on_bytes: OnBytes = ignore_bytes,
) -> None:
    """Write the files as their tensors are put together, each ``changed`` and under all its names.

    A file is written by the rank that ``rank_of`` gives for its first bundle; errors name
    ``target``. Collective: the default group; an error (a full disk) is raised on all ranks once
    all has been received.
    """
    file_of = {tensor.name: file for file in files for tensor in file.tensors}

    def file_with(bundle: Bundle) -> PlannedFile:
        return file_of[names(bundle, bundle.sources[0])[0]]

    ranks: dict[str, int] = {}
    for bundle in tensors.bundles:
        ranks.setdefault(file_with(bundle).name, rank_of(bundle))
    collected = tensors.collect(lambda bundle: ranks[file_with(bundle).name], on_bytes=on_bytes)
    at_work: PlannedFile | None = None
    error: Exception | None = None
    with ExitStack() as opened:
        # An error of what is collected is this rank's alone, and ends all by the board of failures.
        for bundle, source, tensor in collected:
            if error is not None:  # the other ranks still send, so go on receiving
                continue
            try:
                if at_work is not (file := file_with(bundle)):
                    opened.close()  # the disk has a whole file before the next begins
                    add = opened.enter_context(new_tensor_file(folder, file))
                    at_work = file
                values = changed(source, tensor)
                for name in names(bundle, source):
                    add(name, values)
            except Exception as caught:  # whatever it is, the other ranks are waiting
                error = caught
        with together(target):
            opened.close()
            if error is not None:
                raise error


def usual_dtype(dtypes: dict[str, torch.dtype]) -> torch.dtype:
    """The dtype that most tensors have; float32 of none."""
    counts = Counter(dtypes.values())
    return counts.most_common(1)[0][0] if counts else torch.float32


def _write_configs(
    folder: Path, model: HuggingFaceModel, *, dtype: torch.dtype, processor_folder: Path
) -> None:
    """Keep the configs that were carried along where they are this model's."""
    from transformers import GenerationConfig

    carried = folder / CONFIG_FILE
    if carried.is_file() and not hf_config_differences(processor_folder, model, alone=True):
        _note_dtype(carried, dtype)
    else:
        exported = hf_config(model)
        exported.dtype = dtype
        exported.save_pretrained(folder)
    if not (folder / GENERATION_CONFIG_FILE).is_file():
        end, pad = _end_and_pad_ids(processor_folder)
        generation = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False)
        generation.save_pretrained(folder)


def carried_files(processor_folder: Path, weights_folder: Path | None = None) -> dict[str, Path]:
    """What stands beside a model's weights and is no code, by its place in an export.

    Tokenizer, processors and configs are ``processor_folder``'s; what else it lacks and the
    ``weights_folder`` has comes, too. Links are followed within a folder and the hub's cache around
    it, those of the usual names anywhere. Exports and checkpoints within a folder are left out.
    """
    found: dict[str, Path] = {}
    for source in (weights_folder or processor_folder, processor_folder):
        found = {name: path for name, path in found.items() if name not in _USUAL}
        found |= {name: source / name for name in _USUAL if (source / name).is_file()}
        homes = (source.resolve(), source.resolve().parent.parent / "blobs")
        for place, folders, files in source.walk():
            if place != source and {EXPORT_LIST, TRACKER} & {*files}:
                folders.clear()
                continue
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (place / name for name in files if not _NOT_CARRIED.fullmatch(name)):
                true = path.resolve()
                if true.is_file() and any(map(true.is_relative_to, homes)):
                    found[path.relative_to(source).as_posix()] = path
    return found


def copy_carried_files(target: Path, processor_folder: Path, weights_folder: Path | None) -> None:
    """Copy what :func:`carried_files` finds into ``target``."""
    for name, path in carried_files(processor_folder, weights_folder).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Change a carried config's dtype, under whichever of its names; else not a byte of it."""
    text = path.read_text(encoding="utf-8")
    config, name = json.loads(text), str(dtype).removeprefix("torch.")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        section |= {key: name for key in ("dtype", "torch_dtype") if key in section}
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = name
    if config != json.loads(text):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _end_and_pad_ids(processor_folder: Path) -> tuple[int, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(processor_folder), local_files_only=True, trust_remote_code=False
    )
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if end is None:
        raise ValueError(
            f"The tokenizer in {processor_folder} names no eos_token, so an exported model would "
            "never end an answer; set it in tokenizer_config.json."
        )
    return end, end if pad is None else pad
