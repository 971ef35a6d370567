"""Reading ``torch_dist`` checkpoints without running what a stranger may have put into them."""

import dataclasses
import enum
import io
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Self

import torch
from torch.futures import Future

from loongplug.platform.replacements import as_wrapper

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


class DamagedFileError(ValueError):
    """Says which file of a checkpoint is not as it was written, and in what."""

    @classmethod
    def unreadable(cls, file: Path, error: BaseException | str) -> Self:
        """``file`` cannot be read, because of ``error``."""
        why = error if isinstance(error, str) else _in_a_line(error)
        return cls(f"{file} cannot be read ({why}): copy or save the checkpoint again.")


def _in_a_line(error: BaseException) -> str:
    text, name = str(error), type(error).__name__
    if isinstance(error, pickle.UnpicklingError) and "\n" in text:
        # torch's, which goes on to say how to run what is in there.
        named = re.search(r"GLOBAL ([\w.]+)", text)
        return "some of it is not a saved tensor" + (f", it names {named[1]}" if named else "")
    return f"{name}: {text.splitlines()[0]}" if text.strip() else name


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


@as_wrapper
def weights_only(original: Any, self: Any, read_item: Any, value: io.BytesIO) -> None:
    """``DefaultLoadPlanner.load_bytes`` that unpickles weights and registered classes only."""
    torch.load(value, weights_only=True)  # refuses what the original would run
    value.seek(0)
    original(self, read_item, value)


@as_wrapper
def naming_files(original: Any, self: Any, plan: Any, planner: Any) -> Any:
    """``FileSystemReader.read_data`` that names the file which cannot be read.

    No collectives. Raises DamagedFileError in the place of what the original raises.
    """
    by_file: dict[str, list[Any]] = {}
    for item in plan.items:
        by_file.setdefault(_file_of(self, item), []).append(item)
    done: Any = Future()
    done.set_result(None)
    for name, items in by_file.items():  # as the original does, and reads each once
        try:
            done = original(self, dataclasses.replace(plan, items=items), planner)
        except (MemoryError, torch.OutOfMemoryError):  # not the file's
            raise
        except Exception as error:  # damaged bytes raise nearly anything
            raise DamagedFileError.unreadable(Path(self.path) / name, error) from error
    return done


def _file_of(reader: Any, item: Any) -> str:
    stored = reader.storage_data.get(item.storage_index)
    if stored is None:
        raise DamagedFileError.unreadable(
            Path(reader.path) / ".metadata", f"it does not say where {item.storage_index.fqn} lies"
        )
    return str(stored.relative_path)
