"""What torch's writer is given of a parameter that is saved as several tensors."""

import pytest
import torch

from loongplug.convert.streaming import _in_its_own_storage


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
