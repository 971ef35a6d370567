"""Weights of adapters: their first values, in and out of folders that ``peft`` loads, merged."""

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loongplug.checkpoint.common_errors import together
from loongplug.checkpoint.export_folder import check_export_folder, new_export
from loongplug.checkpoint.hf_export import write_files
from loongplug.checkpoint.hf_gather import (
    OnBytes,
    WeightOf,
    WholeTensors,
    ignore_bytes,
    loaded_weight,
)
from loongplug.checkpoint.hf_import import fill_all
from loongplug.checkpoint.parameter_holders import HeldParameter, held_parameters, own_rank
from loongplug.checkpoint.safetensors_folder import (
    PlannedFile,
    PlannedTensor,
    check_finite,
    shape_problems,
)
from loongplug.checkpoint.settings_notes import ARCHITECTURE_FILE, write_note
from loongplug.models.family import HuggingFaceModel, check_all_is_read
from loongplug.models.hf_mapping import Bundle, Source, Where
from loongplug.models.hf_slices import local_shape, read_local
from loongplug.models.lora.adapter import Adapter, adapters
from loongplug.models.lora.mapping import AdapterTable
from loongplug.models.lora.peft_config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    open_adapters,
    peft_config,
)

_KIND = "adapters"


def check_adapter_export(folder: Path, *, model: HuggingFaceModel) -> None:
    """Refuse an export of adapters that cannot work; for one rank, no collectives."""
    check_all_is_read(model)
    check_export_folder(folder, kind=_KIND)


def save_adapters(
    model_chunks: Sequence[nn.Module],
    folder: Path,
    *,
    table: AdapterTable,
    base: str | None,
    model_yaml: Mapping[str, Any],
    on_bytes: OnBytes = ignore_bytes,
    weight_of: WeightOf = loaded_weight,
) -> None:
    """Write the adapters into ``folder``, in the parameters' dtype.

    Rank 0 writes, tensor by tensor as they are put together. ``base`` is what the config names as
    the model, ``model_yaml`` describes it in a note; ``on_bytes`` and ``weight_of`` as in
    :func:`~loongplug.checkpoint.hf_export.save_hf_folder`. Collective: the default group; all ranks
    return once the folder is complete.
    """
    tensors = WholeTensors(model_chunks, table.mapping, weight_of=weight_of)
    planned = tuple(
        PlannedTensor(name, table.file_shape(source), tensors.dtype(bundle))
        for bundle in tensors.bundles
        for source in bundle.sources
        for name in table.file_names(bundle, source)
    )
    with new_export(folder, kind=_KIND) as new:
        write_files(
            new,
            (PlannedFile(ADAPTER_WEIGHTS_FILE, planned),),
            tensors,
            target=folder,
            names=table.file_names,
            rank_of=lambda _: 0,
            changed=table.to_file,
            on_bytes=on_bytes,
        )
        with together(folder):
            if own_rank() == 0:
                config = json.dumps(peft_config(table, base=base), indent=2) + "\n"
                (new / ADAPTER_CONFIG_FILE).write_text(config, encoding="utf-8")
                write_note(new / ARCHITECTURE_FILE, model_yaml)


def load_adapters(model_chunks: Sequence[nn.Module], folder: Path, *, table: AdapterTable) -> None:
    """Copy the adapters in ``folder``, ours or ``peft``'s, into those of the chunks, in place.

    Of the ranks that hold the same slice, the first reads it and broadcasts it to the others.
    Collective: the default group, and groups of it made for the purpose.
    """
    with together():
        reader = AdapterReader(folder, table)
        held = held_parameters(model_chunks, table.mapping)
    fill_all(held, reader.fill)


class AdapterReader:
    """The file of a folder, found to have the tensors of a table.

    What the config beside it says was compared when the model was composed.
    """

    def __init__(self, folder: Path, table: AdapterTable) -> None:
        self._folder = folder
        self._table = table
        sources = [(b, source) for b in table.mapping.bundles() for source in b.sources]
        self._names = {source.name: table.file_names(b, source) for b, source in sources}
        self._file = open_adapters(folder)
        # A tensor, once for all the experts that it has: they come one after the other.
        self.whole = lru_cache(maxsize=1)(self._read)
        expected = {
            name: table.file_shape(source)
            for _, source in sources
            for name in self._names[source.name]
        }
        found = {
            name: tuple(self._file.get_slice(name).get_shape())
            for name in self._file.keys()  # noqa: SIM118
        }
        if problems := shape_problems(found, expected):
            raise ValueError(
                f"The adapters in {folder} are not those of the config:\n  " + "\n  ".join(problems)
            )

    def fill(self, own: HeldParameter) -> None:
        """Read one parameter of this rank."""
        entry = own.entry
        bundle = Bundle(entry.row, entry.number, entry.layer)

        def read(index: int, where: Where) -> Tensor:
            return self.whole(bundle.sources[index])[where]

        local = read_local(entry, read, rank=own.piece.part, tp=own.piece.parts)
        own.parameter.data.copy_(local)

    def _read(self, source: Source) -> Tensor:
        first, *copies = self._names[source.name]
        tensor: Tensor = self._file.get_tensor(first)
        check_finite(first, tensor, file=self._folder / ADAPTER_WEIGHTS_FILE)
        for copy in copies:
            if not tensor.equal(self._file.get_tensor(copy)):
                raise ValueError(
                    f"{copy} in {self._folder} differs from {first}, but here the two projections "
                    "are one linear, whose adapter has one A; train such adapters with peft, or "
                    "merge them into the model there."
                )
        return self._table.from_file(source, tensor)


def start_adapters(model_chunks: Sequence[nn.Module], table: AdapterTable, *, seed: int) -> None:
    """Give every ``a`` random values; every ``b`` stays zero.

    The values depend on ``seed`` and on the name of the parameter in the whole model, so they are
    the same in every layout. No collectives.
    """
    for own in held_parameters(model_chunks, table.mapping):
        if own.parameter.device.type == "meta" or not own.name.endswith(".a"):
            continue
        (source,) = own.entry.sources
        matrix = _uniform(source.matrix, f"{seed} {own.name}")  # of experts, one's
        columns = local_shape(own.entry.row, tp=own.piece.parts)[1]
        first = own.piece.part * columns
        own.parameter.data.copy_(matrix[:, first : first + columns])


def _uniform(shape: tuple[int, ...], name: str) -> Tensor:
    """[rank, in] within 1 / sqrt(in), as a linear of torch starts."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def merged_weights(
    model_chunks: Sequence[nn.Module], *, weight_of: WeightOf = loaded_weight
) -> WeightOf:
    """``weight_of`` with the adapters of the chunks merged into what they stand beside.

    Sums are taken in float32 and rounded once; a weight without an adapter is left as it is.
    Each rank merges its own slices. No collectives.
    """
    beside: dict[nn.Parameter, Adapter] = {}
    for chunk in model_chunks:
        for adapter, linear in adapters(chunk):
            weight = linear.weight
            assert isinstance(weight, nn.Parameter)
            beside[weight] = adapter

    def merged(parameter: nn.Parameter) -> Tensor:
        weight = weight_of(parameter)
        adapter = beside.get(parameter)
        if adapter is None:
            return weight
        product = adapter.product(weight_of(adapter.a), weight_of(adapter.b))
        return (weight.float() + product).to(weight.dtype)

    return merged
