"""Reading ``torch_dist`` checkpoints without running what a stranger may have put into them."""

import dataclasses
import enum
import functools
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

# What torch and Megatron put into a checkpoint's .metadata, by module.
_PLAIN = {
    "builtins": {"set", "slice"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # as Python 3.13 names it
    "torch": {"Size", "device"},
    "torch._C": {"layout"},
    "torch.serialization": {"_get_layout"},
}
_DESCRIPTIONS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows torch's data types and the classes that describe a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if name in _PLAIN.get(module, ()) or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        if module in _DESCRIPTIONS and "." not in name:
            found = super().find_class(module, name)
            # Nothing that such a module imports, and nothing that does more than hold values.
            if getattr(found, "__module__", None) == module and _holds_values(found):
                return found
        raise pickle.UnpicklingError(
            f"the checkpoint's metadata names {module}.{name}, which no checkpoint needs: it is "
            "of another version of torch, or made to run code"
        )


def _holds_values(found: Any) -> bool:
    return isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
    )


def load_metadata(file: BinaryIO) -> Any:
    """``pickle.load`` of a checkpoint's ``.metadata``.

    Raises:
        pickle.UnpicklingError: it names anything but data types and torch's own descriptions.
    """
    return _MetadataUnpickler(file).load()


METADATA_PICKLE = SimpleNamespace(load=load_metadata, dump=pickle.dump)


def weights_only(original: Callable[..., None]) -> Callable[..., None]:
    """``DefaultLoadPlanner.load_bytes`` that unpickles weights and registered classes only."""

    @functools.wraps(original)
    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # refuses what the original would run
        value.seek(0)
        original(self, read_item, value)

    return load_bytes
