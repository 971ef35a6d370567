"""Fill a model's parameters from a Hugging Face folder; each byte of it is read by one rank."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongplug.checkpoint.common_errors import raise_together, together
from loongplug.checkpoint.hf_gather import OnBytes, ignore_bytes
from loongplug.checkpoint.parameter_holders import (
    HeldParameter,
    all_holders,
    held_parameters,
    own_rank,
    replica_groups,
)
from loongplug.checkpoint.safetensors_folder import (
    FLOATS,
    TensorFolder,
    open_tensors,
    shape_problems,
)
from loongplug.models.family import HuggingFaceModel
from loongplug.models.hf_config import hf_config_differences
from loongplug.models.hf_mapping import Mapping, Where
from loongplug.models.hf_slices import read_local


def load_hf_weights(
    model_chunks: Sequence[nn.Module],
    folder: Path,
    *,
    model: HuggingFaceModel,
    on_bytes: OnBytes = ignore_bytes,
    in_the_file: bool = False,
) -> int:
    """Copy the weights in ``folder`` into the parameters of ``model_chunks``, in place.

    Of the ranks that hold the same slice of a parameter, the first reads it, converts it to the
    parameter's dtype and broadcasts it to the others. Call it with all chunks of a rank, before an
    optimizer copies the parameters. Memory beside the parameters: the slice being read. With
    ``in_the_file``, for models that are not trained, a parameter that the file has as it is stays
    there, mapped. Gives the bytes that this rank has read.

    Collective: the default group, and groups of it made for the purpose. Raises ValueError on all
    ranks alike, with everything that is missing, extra, misshapen or said otherwise by config.json;
    no parameter was changed unless a file broke while it was read.
    """
    mapping = model.mapping
    with ExitStack() as stack:
        with together():
            # The published files and those that transformers writes differ in what is transposed;
            # it reads both.
            opened = open_tensors(
                folder,
                turnable=mapping.transposed_sources(),
                formerly=model.in_transformers.formerly,
                aside=model.in_transformers.aside,
            )
            tensors = stack.enter_context(opened)
            held = _checked(model_chunks, tensors, model=model)
        fill = partial(_fill, tensors=tensors, mapping=mapping, in_the_file=in_the_file)
        fill_all(held, fill, on_bytes=on_bytes)
    return tensors.bytes_read


def _checked(
    model_chunks: Sequence[nn.Module], tensors: TensorFolder, *, model: HuggingFaceModel
) -> list[HeldParameter]:
    missing_or_extra = _file_problems(tensors, model.mapping)
    problems = [
        *(model.unread if missing_or_extra else ()),
        *hf_config_differences(tensors.path, model),
        *missing_or_extra,
    ]
    if problems:
        raise ValueError(
            f"The model in {tensors.path} is not the one in the config:\n  " + "\n  ".join(problems)
        )
    return held_parameters(model_chunks, model.mapping)


def _file_problems(tensors: TensorFolder, mapping: Mapping) -> list[str]:
    expected, found = mapping.sources(), tensors.shapes()
    allowed = expected | {
        twin: expected[name] for twin, name in mapping.twins.items() if twin in found
    }
    problems = shape_problems(found, allowed)
    problems += [
        f"{name} has type {kind}, expected a floating point type; save the model unquantized"
        for name, kind in tensors.types().items()
        if kind not in FLOATS
    ]
    return problems


def fill_all(
    held: Sequence[HeldParameter],
    fill: Callable[[HeldParameter], None],
    *,
    on_bytes: OnBytes = ignore_bytes,
) -> None:
    """Read or receive every parameter; the first error is raised once all have taken part.

    ``fill`` is called for what this rank is the first to hold. The parameters have to be on the
    platform's device, where NCCL broadcasts from. Collective: the default group, and groups of it
    made for the purpose; raises ValueError on all ranks alike.
    """
    done, total = 0, sum(own.parameter.nbytes for own in held)
    error: Exception | None = None
    holders, _ = all_holders(held)
    with replica_groups(holders) as groups:
        for own in held:
            ranks = holders[own.piece]
            if ranks[0] == own_rank() and error is None:
                try:
                    fill(own)
                except Exception as caught:  # the other holders still wait for the broadcast
                    error = caught
            if ranks in groups:
                dist.broadcast(own.parameter.data, src=ranks[0], group=groups[ranks])
                # NCCL only queues: without a stop, ranks that read nothing would run ahead of the
                # disk until their broadcasts time out.
                torch.cuda.synchronize()
            done += own.parameter.nbytes
            on_bytes(done, total)
    raise_together(error)


def _fill(
    own: HeldParameter, *, tensors: TensorFolder, mapping: Mapping, in_the_file: bool
) -> None:
    twins = {name: twin for twin, name in mapping.twins.items() if twin in tensors.slices}
    sources = own.entry.sources

    def read(index: int, where: Where) -> Tensor:
        name = sources[index].name
        tensor = tensors.read(name, where)
        twin = twins.get(name)
        if twin is not None and not torch.equal(tensor, tensors.read(twin, where)):
            raise ValueError(
                f"{twin} in {tensors.path} differs from {name}, but the config ties the two; "
                "set tie_word_embeddings to false to train them apart."
            )
        return tensor

    local = read_local(own.entry, read, rank=own.piece.part, tp=own.piece.parts)
    assert local.shape == own.parameter.shape, (own.name, local.shape, own.parameter.shape)
    if in_the_file and local.dtype == own.parameter.dtype and local.is_contiguous():
        own.parameter.data = local
        return
    with torch.no_grad():
        own.parameter.copy_(local)
