"""What torch's writer is given of a parameter that is saved as several tensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from ranks import run_ranks

from loongplug.convert.torch_dist_files import StreamingSaveStrategy


def saved_halves(rank: int, *, folder: Path) -> int:
    """How often torch copied a tensor while the halves of one were saved."""
    whole = torch.arange(24.0).reshape(6, 4)
    named = dict(zip(("gate", "up"), whole.chunk(2), strict=True))
    copies: list[int] = []

    def counting(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        copies.append(tensor.nbytes)
        return torch.empty_like(tensor).copy_(tensor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", counting)
        StreamingSaveStrategy().save(
            {name: ShardedTensor.from_rank_offsets(name, half) for name, half in named.items()},
            folder,
        )
    read = {name: torch.zeros_like(half) for name, half in named.items()}
    dcp.load(read, storage_reader=dcp.FileSystemReader(folder))
    assert all(torch.equal(read[name], half) for name, half in named.items())
    return len(copies)


def test_halves_are_saved_without_a_copy(tmp_path: Path) -> None:
    assert run_ranks(saved_halves, 1, folder=tmp_path, timeout=60.0) == [0]
