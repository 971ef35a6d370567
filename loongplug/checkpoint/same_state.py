"""The checks that a checkpoint's state is the run's: weights, tensor by tensor, and optimizer.

They need no note beside the checkpoint, and see what Megatron passes over: tensors that the model
lacks, vocabularies of another size, optimizer state of another kind.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from loongplug.checkpoint.agreement import of_all_ranks, together
from loongplug.checkpoint.notes import refuse_differences
from loongplug.checkpoint.whole import description, told_of_damage
from loongplug.platform.safe_reading import DamagedFileError

Shapes = Mapping[str, tuple[int, ...]]

_FLAG = "--use-distributed-optimizer"
ANEW = (
    "Load the weights alone: by --finetune to start at iteration 0, by --no-load-optim to go on "
    "from the checkpoint's."
)
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

    @wraps(load)
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
    with _wanted(sharded_state_dict, _MODEL_CHUNK) as wanted:
        if wanted:
            saved = {
                name: tuple(described.size)
                for name, described in saved_tensors(folder).items()
                if not _OPTIMIZER.search(name)
            }
            refuse_differences(saved, wanted, folder=folder)


def check_trained_tensors(sharded_state_dict: Mapping[str, Any], folder: Path) -> None:
    """Refuse optimizer state that lacks what is trained here: it was frozen when it was saved.

    State of what is frozen here is left where it is. Collective: the default group. Raises
    ValueError, on every rank, with the first parameters.
    """
    with _wanted(sharded_state_dict, _OPTIMIZER_ENTRY) as wanted:
        missing = sorted(wanted.keys() - saved_tensors(folder)) if wanted else []
        if missing:
            names = list(dict.fromkeys(_STATE.sub("", name) for name in missing))
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"The checkpoint in {folder} has no optimizer state for {shown}: frozen when "
                f"it was saved, trained here. {ANEW}"
            )


@contextmanager
def _wanted(sharded_state_dict: Mapping[str, Any], entries: re.Pattern[str]) -> Iterator[Shapes]:
    """What the state's ``entries`` of all ranks are to be loaded from, by name, with whole shapes.

    Collective: the default group; what goes wrong inside goes wrong on all ranks.
    """
    with together():
        wanted: Shapes = {}
        error: Exception | None = None
        try:
            wanted = _shapes(sharded_state_dict, entries)
        except Exception as problem:  # told once all have come together
            error = problem
        everyone = of_all_ranks(wanted)
        if error is not None:
            raise error
        yield {name: shape for shapes in everyone for name, shape in shapes.items()}


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


def checked_common_state(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Megatron's reading of what is not a tensor, which comes first in a load, with the check.

    No collectives; all ranks read the same, and so raise the same ValueError.
    """

    @wraps(original)
    def load_common_state_dict(checkpoint_dir: Any) -> Any:
        from megatron.training.global_vars import get_args

        checkpoint = Path(checkpoint_dir)
        with told_of_damage(checkpoint):
            state = _read(original, checkpoint)
        check_optimizer(state.get("args"), get_args(), folder=checkpoint)
        return state

    return load_common_state_dict


def _read(original: Callable[[Any], Any], checkpoint: Path) -> dict[str, Any]:
    alone = checkpoint / COMMON_STATE_FNAME  # what older checkpoints have it in
    try:
        state = original(checkpoint)
    except Exception as error:  # damaged bytes raise nearly anything
        if not alone.is_file() or isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError.unreadable(alone, error) from error
    if not isinstance(state, dict):
        raise DamagedFileError(
            f"What is not a tensor in {checkpoint} is {type(state).__name__}, expected dict: copy "
            "or save the checkpoint again."
        )
    return state


def check_optimizer(saved: Namespace | None, args: Namespace, *, folder: Path) -> None:
    """Refuse optimizer state saved with the distributed optimizer for a run without, and so on.

    ``saved`` are the arguments of the run that saved; checkpoints from elsewhere may lack them.

    Raises:
        ValueError: the run is to load the optimizer state, and it is of the other kind.
    """
    distributed = getattr(saved, "use_distributed_optimizer", None)
    if args.no_load_optim or args.finetune or getattr(saved, "no_save_optim", False):
        return
    if saved is not None and _in_part(saved) != _in_part(args):
        raise ValueError(
            f"The optimizer state in {folder} was saved with "
            f"{'some' if _in_part(saved) else 'no'} parameters frozen by pattern, and here "
            f"{'some' if _in_part(args) else 'none'} are. {ANEW}"
        )
    if distributed in (None, args.use_distributed_optimizer):
        return
    raise ValueError(
        f"The optimizer state in {folder} was saved {'with' if distributed else 'without'} "
        f"{_FLAG}, and its two kinds do not load into each other; "
        f"{'give' if distributed else 'drop'} {_FLAG}, or load the weights alone by "
        "--no-load-optim."
    )


def _in_part(args: Namespace) -> bool:
    """Whether modules may be frozen in part, for which state is saved in other pieces."""
    return bool(getattr(args, "freeze_parameters", ()) or getattr(args, "train_parameters", ()))
