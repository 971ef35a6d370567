"""Whether two Hugging Face folders have the same weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def assert_same_weights(before: Path, after: Path) -> None:
    """Both folders' ``model.safetensors`` have tensors of the same names, dtypes and values."""
    expected, found = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype, name
        assert torch.equal(tensor, found[name]), name
