"""The checks that a checkpoint's optimizer state is what the run's optimizer takes."""

from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from loongplug.checkpoint.whole import told_of_damage
from loongplug.platform.safe_reading import DamagedFileError

_FLAG = "--use-distributed-optimizer"
ANEW = (
    "Load the weights alone: by --finetune to start at iteration 0, by --no-load-optim to go on "
    "from the checkpoint's."
)


def checked_common_state(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Megatron's reading of what is no tensor, which comes first in a load, with the check.

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
            f"What is no tensor in {checkpoint} is {type(state).__name__}, expected dict: copy or "
            "save the checkpoint anew."
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
