"""The check that a checkpoint's weights are the model's, tensor by tensor.

It needs no note beside the checkpoint, and sees what Megatron passes over: tensors that the
model lacks, and vocabularies of another size.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loongplug.checkpoint.agreement import raise_together
from loongplug.checkpoint.architecture import refuse_differences
from loongplug.checkpoint.same_optimizer import ANEW
from loongplug.checkpoint.whole import description, told_of_damage

Shapes = Mapping[str, tuple[int, ...]]

_MODEL_CHUNK = re.compile(r"model\d*")
_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")
_OPTIMIZER_ENTRY = re.compile(r"optimizer")
# What stands before a parameter's name in the name of its state.
_STATE = re.compile(r"^(.*\.)?optimizer\.(state\.)?[^.]+\.")


def checked_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's load of one checkpoint, after the check.

    ``--dist-ckpt-strictness`` with another value than its default leaves the check out: then the
    user has said what to do about differences.

    Collective: the default group. Raises ValueError, on every rank, with the first differences;
    on the ranks that read it, with a file that turns out to be damaged.
    """

    @functools.wraps(load)
    def load_checked(
        sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
    ) -> Any:
        strict = kwargs.get("strict", "assume_ok_unexpected")
        if getattr(strict, "value", strict) == "assume_ok_unexpected":
            check_same_tensors(sharded_state_dict, Path(checkpoint_dir))
            check_trained_tensors(sharded_state_dict, Path(checkpoint_dir))
        with told_of_damage(Path(checkpoint_dir)):
            return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load_checked


def check_same_tensors(sharded_state_dict: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint's folder whose weights differ in name or shape from the model's.

    Collective: the default group. Raises ValueError, on every rank, with the first differences.
    """
    error: Exception | None = None
    wanted: dict[str, tuple[int, ...]] = {}
    try:
        wanted = _model_shapes(sharded_state_dict)
    except Exception as problem:  # told to the other ranks
        error = problem
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    if error is None and wanted:
        try:
            here = {name: shape for shapes in everyone for name, shape in shapes.items()}
            refuse_differences(_saved_shapes(folder), here, folder=folder)
        except Exception as problem:
            error = problem
    raise_together(error)


def check_trained_tensors(sharded_state_dict: Mapping[str, Any], folder: Path) -> None:
    """Refuse optimizer state that lacks what is trained here: it was frozen when it was saved.

    State of what is frozen here is left where it is. Collective: the default group. Raises
    ValueError, on every rank, with the first parameters.
    """
    error: Exception | None = None
    wanted: set[str] = set()
    try:
        wanted = set(_shapes(sharded_state_dict, _OPTIMIZER_ENTRY))
    except Exception as problem:  # told to the other ranks
        error = problem
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    wanted = set().union(*everyone)
    if error is None and wanted:
        try:
            missing = sorted(wanted - set(saved_tensors(folder)))
            if missing:
                names = list(dict.fromkeys(_STATE.sub("", name) for name in missing))
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                error = ValueError(
                    f"The checkpoint in {folder} has no optimizer state for {shown}: frozen when "
                    f"it was saved, trained here. {ANEW}"
                )
        except Exception as problem:
            error = problem
    raise_together(error)


def _model_shapes(sharded_state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the tensors that this rank's model chunks are to be loaded from."""
    return _shapes(sharded_state_dict, _MODEL_CHUNK)


def _shapes(
    sharded_state_dict: Mapping[str, Any], entries: re.Pattern[str]
) -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    chunks = {key: value for key, value in sharded_state_dict.items() if entries.fullmatch(key)}
    preprocessed, *_ = load_preprocess(chunks)
    return {
        value.key: tuple(value.global_shape)
        for value in nested_values(preprocessed)
        if isinstance(value, ShardedTensor)
    }


def saved_tensors(folder: Path) -> dict[str, Any]:
    """torch's description (size and properties) of each tensor of a ``torch_dist`` checkpoint.

    Raises:
        ValueError: it is damaged.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name: described
        for name, described in description(folder).state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }


def _saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(described.size)
        for name, described in saved_tensors(folder).items()
        if not _OPTIMIZER.search(name)
    }
