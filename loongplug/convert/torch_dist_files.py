"""Megatron's ``torch_dist`` files read and written one tensor after the other.

Megatron's own save and load hold both halves of every gated projection a second time, half of the
model once more. That is right beside training, and too much for a conversion.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor, load_content_metadata
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from loongplug.checkpoint.checkpoint_files import described_files, first_reason, told_of_damage
from loongplug.checkpoint.common_errors import together, write_error
from loongplug.checkpoint.hf_gather import WeightOf
from loongplug.checkpoint.resume_checks import check_same_tensors
from loongplug.convert.mapped_weights import MappingReader


class StreamingSaveStrategy(TorchDistSaveShardedStrategy):
    """Writes the same files by torch's own writer.

    Upstream's writer is made to run beside training, and so copies every tensor of the host that
    shares its memory before it writes the first one.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Write this rank's tensors. Collective: the default group."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        try:
            dcp.save(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=dcp.FileSystemWriter(checkpoint_dir),
                planner=_UncopiedViews(
                    dedup_replicated_tensors=not self.keep_only_main_replica,
                    flatten_state_dict=False,
                    flatten_sharded_tensors=False,
                ),
            )
        except CheckpointException as caught:  # on all ranks; no Exception
            reason = first_reason(caught)
            if not isinstance(reason, OSError):
                raise
            raise write_error(checkpoint_dir.parent, reason) from caught


class _UncopiedViews(MCoreSavePlanner):
    """Gives torch's writer each tensor in a storage of just its size.

    The writer copies every tensor whose storage holds more, as that of both halves of a gated
    projection does, and keeps all copies until the file is closed.
    """

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return _in_its_own_storage(data) if isinstance(data, Tensor) else data


def _in_its_own_storage(tensor: Tensor) -> Tensor:
    """The same memory, where it is in one piece on the host; else ``tensor`` itself."""
    tensor = tensor.detach()
    if not tensor.is_cpu or not tensor.is_contiguous():
        return tensor
    begin = tensor.storage_offset() * tensor.itemsize
    piece = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(piece, 0, tensor.shape, tensor.stride())


def load_in_place(
    model_chunks: Sequence[nn.Module], folder: Path, *, in_the_file: bool = False
) -> WeightOf:
    """Fill the parameters from a checkpoint's folder, after a look at names and shapes.

    Upstream loads the halves of a gated projection and puts them together afterwards; here they
    are views of the parameter, so that nothing is left to do. With ``in_the_file``, for models
    that are not trained, the parameters that the files hold as they are stay there, mapped.
    Collective: the default group.

    Returns:
        what gives a parameter's values.

    Raises ValueError: on all ranks alike, where the checkpoint is of another model, or damaged.
    """
    with together(), told_of_damage(folder):
        described_files(folder)
        state = _sharded_state(model_chunks, folder)
    check_same_tensors(state, folder)
    parameters = [each for chunk in model_chunks for each in chunk.parameters()]
    reader = MappingReader(folder, parameters if in_the_file else [])
    with together():
        _read(state, reader, folder)
    return reader.weight


def _sharded_state(model_chunks: Sequence[nn.Module], folder: Path) -> dict[str, Any]:
    """Megatron's description of the tensors that the chunks need, in the places that they have."""
    metadata = load_content_metadata(str(folder))
    state: dict[str, Any] = {
        f"model{number}": chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for number, chunk in enumerate(model_chunks)
    }
    apply_factories(state)
    tensors, _ = extract_matching_values(state, lambda each: isinstance(each, ShardedTensor))
    for shard in nested_values(tensors):
        shard.allow_shape_mismatch = False  # or it would be filled with zeros first
    return tensors


def _read(state: dict[str, Any], reader: dcp.FileSystemReader, folder: Path) -> None:
    """Upstream's load by another reader, with an error for the user."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(state)
    try:
        with told_of_damage(folder):
            dcp.load(
                mcore_to_pyt_state_dict(by_key, True),
                storage_reader=reader,
                planner=MCoreLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except CheckpointException as caught:  # torch's is not an Exception
        reason = first_reason(caught)
        raise ValueError(
            f"The checkpoint {folder} cannot be read ({reason!r}): copy or save it again."
        ) from caught
