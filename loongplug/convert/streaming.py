"""Megatron's ``torch_dist`` files read and written one tensor after the other.

Megatron's own save and load hold both halves of every gated projection a second time, half of the
model once more. That is right beside training, and too much for a conversion.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import nn

from loongplug.checkpoint.agreement import raise_together
from loongplug.checkpoint.same_tensors import check_same_tensors


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
        dcp.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
        )


def load_in_place(model_chunks: Sequence[nn.Module], folder: Path) -> None:
    """Fill the parameters from a checkpoint's folder, after a look at names and shapes.

    Upstream loads the halves of a gated projection and puts them together afterwards; here they
    are views of the parameter, so that nothing is left to do. Collective: the default group.

    Raises:
        ValueError: on all ranks alike, where the checkpoint is of another model.
    """

    def shards() -> dict[str, Any]:
        return {
            f"model{number}": chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            for number, chunk in enumerate(model_chunks)
        }

    metadata = load_content_metadata(str(folder))
    check_same_tensors(shards(), folder)
    error: Exception | None = None
    try:
        in_place = shards()
        apply_factories(in_place)
        TorchDistLoadShardedStrategy().load(in_place, folder)
    except Exception as caught:  # whatever it is, the other ranks are waiting
        error = caught
    raise_together(error)
