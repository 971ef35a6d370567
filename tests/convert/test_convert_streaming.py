"""What torch's writer is given of a parameter that is saved as several tensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from ranks import run_ranks

from loongplug.convert.streaming import StreamingSaveStrategy, _in_its_own_storage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_half_has_a_storage_of_its_size_and_is_no_copy(dtype: torch.dtype) -> None:
    """Torch's writer copies what has a larger one, and keeps the copies until it has ended."""
    whole = torch.nn.Parameter(torch.arange(24).reshape(6, 4).to(dtype))
    for half in whole.chunk(2):
        given = _in_its_own_storage(half)
        assert torch.equal(given, half)
        assert given.data_ptr() == half.data_ptr()
        assert given.untyped_storage().size() == given.nbytes
        assert not given.requires_grad


def test_columns_stay_as_they_are() -> None:
    """They are in many pieces; the writer has to copy them."""
    columns = torch.arange(24.0).reshape(6, 4)[:, 1:3]
    given = _in_its_own_storage(columns)
    assert torch.equal(given, columns)
    assert given.untyped_storage().size() > given.nbytes


def test_the_memory_outlives_the_whole() -> None:
    half = _in_its_own_storage(torch.arange(24.0).reshape(6, 4)[3:])
    torch.full((6, 4), -1.0)  # would take the place of what had been freed
    assert half.tolist() == torch.arange(12.0, 24.0).reshape(3, 4).tolist()


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
