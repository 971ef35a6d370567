"""Checkpoints of a few numbers, as Megatron's ``torch_dist`` format has them."""

import json
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter, save


def write_checkpoint(folder: Path, name: str) -> Path:
    """``name`` in ``folder``, with two files; gives its path."""
    checkpoint = folder / name
    state = {"weight": torch.arange(64.0), "plain": [1, 2], "bias": torch.ones(4)}
    writer = FileSystemWriter(checkpoint, single_file_per_rank=False)
    save(state, storage_writer=writer, no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (checkpoint / "metadata.json").write_text(json.dumps(config))
    return checkpoint
