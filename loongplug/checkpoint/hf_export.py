"""Export a model as a Hugging Face folder that ``transformers`` loads."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from loongplug.checkpoint.agreement import raise_together
from loongplug.checkpoint.carried_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    carried_names,
    copy_carried_files,
)
from loongplug.checkpoint.dtypes import usual_dtype
from loongplug.checkpoint.hf_gather import WeightOf, WholeTensors, loaded_weight
from loongplug.checkpoint.holders import own_rank
from loongplug.checkpoint.progress import OnBytes, ignore_bytes
from loongplug.checkpoint.replaced_files import Building, check_replaceable, replaced_files
from loongplug.checkpoint.tensor_files import (
    PlannedFile,
    PlannedTensor,
    TensorFileWriter,
    plan_files,
    write_index,
)
from loongplug.checkpoint.tensor_folder import INDEX_FILE, WEIGHTS_FILE
from loongplug.checkpoint.write_errors import write_error
from loongplug.data.processor import IMAGE_PROCESSOR_FILES, TOKENIZER_FILES
from loongplug.models.hf_mapping import Bundle
from loongplug.models.hf_model import (
    HuggingFaceModel,
    check_all_is_read,
    hf_config,
    hf_config_differences,
)

MAX_FILE_BYTES = 5 * 1024**3
_KIND = "model"
_WEIGHTS = re.compile(r"model-\d+-of-\d+\.safetensors")


def check_hf_export(folder: Path, *, model: HuggingFaceModel, processor_folder: Path) -> None:
    """Refuse an export that cannot work; for the start of a run that exports at its end.

    For one rank; no collectives.

    Raises:
        ValueError: ``folder`` is refused as in :func:`check_replaceable`, ``processor_folder``
            lacks a file, the tokenizer has no end token, or transformers cannot express the model.
    """
    hf_config(model)
    check_all_is_read(model)
    fixed = {
        *(WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE, GENERATION_CONFIG_FILE),
        *carried_names(processor_folder),
    }
    check_replaceable(
        folder,
        kind=_KIND,
        writes=lambda name: name in fixed or _WEIGHTS.fullmatch(name) is not None,
    )
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
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: OnBytes = ignore_bytes,
    weight_of: WeightOf = loaded_weight,
) -> None:
    """Write weights, config, generation config, tokenizer and processor into ``folder``.

    Weights keep the parameters' dtype; the files are the same, to the byte, from any layout. A
    file is written by the rank that has the beginning of it, tensor by tensor as they are put
    together: memory beside the parameters is that of one tensor and a slice of it. The files come
    into the folder when all are whole; those of an older export there, and only those, give way
    (:mod:`loongplug.checkpoint.replaced_files`). All ranks must see the same folder.
    ``on_bytes`` is told, on every rank, how many bytes of how many have been dealt with.
    ``weight_of`` gives a parameter's values where they are not in it.

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
    tensors = WholeTensors(model_chunks, model.mapping, weight_of=weight_of)
    files = plan_files(
        (_planned(bundle, tensors.dtype(bundle)) for bundle in tensors.bundles),
        max_bytes=max_file_bytes,
    )
    dtype = usual_dtype(
        {
            source.name: tensors.dtype(bundle)
            for bundle in tensors.bundles
            for source in bundle.sources
        }
    )
    with replaced_files(folder, kind=_KIND, rank=own_rank()) as building:

        def finish() -> None:
            write_index(building.folder, files)
            _write_configs(building.folder, model, dtype=dtype, processor_folder=processor_folder)

        error = _write_files(building, files, tensors, on_bytes=on_bytes)
        raise_together(error)
        if own_rank() == 0:
            error = error_of_writing(folder, finish)
        raise_together(error)


def _planned(bundle: Bundle, dtype: torch.dtype) -> list[PlannedTensor]:
    return [PlannedTensor(source.name, source.shape, dtype) for source in bundle.sources]


class _Writers:
    """Which rank writes which file, and the file that this rank is writing."""

    def __init__(
        self, building: Building, files: Sequence[PlannedFile], tensors: WholeTensors
    ) -> None:
        self._building = building
        self._file_of = {tensor.name: file for file in files for tensor in file.tensors}
        self._ranks: dict[str, int] = {}
        for bundle in tensors.bundles:
            self._ranks.setdefault(self._file(bundle).name, tensors.first_holder(bundle))
        self._open = ExitStack()
        self._current: tuple[str, TensorFileWriter] | None = None

    def rank_of(self, bundle: Bundle) -> int:
        """The rank that has the beginning of the file that the bundle belongs to."""
        return self._ranks[self._file(bundle).name]

    def write(self, bundle: Bundle, name: str, tensor: Tensor) -> None:
        """Write one of the bundle's tensors, the next in the plan."""
        file = self._file(bundle)
        if self._current is None or self._current[0] != file.name:
            self.close()
            writer = self._open.enter_context(TensorFileWriter(self._building.folder, file))
            self._current = (file.name, writer)
        self._current[1].add(name, tensor)

    def close(self) -> None:
        """Close the file that is being written."""
        self._open.close()
        if self._current is not None:
            name, writer = self._current
            self._building.digests[name] = writer.digest

    def _file(self, bundle: Bundle) -> PlannedFile:
        return self._file_of[bundle.sources[0].name]


def _write_files(
    building: Building, files: Sequence[PlannedFile], tensors: WholeTensors, *, on_bytes: OnBytes
) -> Exception | None:
    """Write this rank's files; an error (a full disk) comes back once all has been received."""
    writers, folder = _Writers(building, files, tensors), building.target
    error: Exception | None = None
    for bundle, source, tensor in tensors.collect(writers.rank_of, on_bytes=on_bytes):
        if error is None:  # else the other ranks send what they have all the same
            error = error_of_writing(folder, partial(writers.write, bundle, source.name, tensor))
    return error or error_of_writing(folder, writers.close)


def error_of_writing(folder: Path, write: Callable[[], None]) -> Exception | None:
    """What went wrong in ``write``, in words for the user where the machine is to blame."""
    try:
        write()
    except OSError as caught:
        return write_error(folder, caught)
    except Exception as caught:  # whatever it is, the other ranks are waiting
        return caught
    return None


def _write_configs(
    folder: Path, model: HuggingFaceModel, *, dtype: torch.dtype, processor_folder: Path
) -> None:
    """Carry the processor's files along, and its configs where they are this model's."""
    from transformers import GenerationConfig

    copy_carried_files(processor_folder, folder)
    carried = folder / CONFIG_FILE
    if carried.is_file() and not hf_config_differences(processor_folder, model):
        _note_dtype(carried, dtype)
    else:
        exported = hf_config(model)
        exported.dtype = dtype
        exported.save_pretrained(folder)
    if not (folder / GENERATION_CONFIG_FILE).is_file():
        end, pad = _end_and_pad_ids(processor_folder)
        generation = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False)
        generation.save_pretrained(folder)


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
