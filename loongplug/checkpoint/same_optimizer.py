"""The check that a checkpoint's optimizer state is of the kind that the run's optimizer takes."""

from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_FLAG = "--use-distributed-optimizer"


def checked_common_state(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Megatron's reading of what is no tensor, which comes first in a load, with the check.

    No collectives; all ranks read the same, and so raise the same ValueError.
    """

    @wraps(original)
    def load_common_state_dict(checkpoint_dir: Any) -> Any:
        from megatron.training.global_vars import get_args

        state = original(checkpoint_dir)
        check_optimizer(state.get("args"), get_args(), folder=Path(checkpoint_dir))
        return state

    return load_common_state_dict


def check_optimizer(saved: Namespace | None, args: Namespace, *, folder: Path) -> None:
    """Refuse optimizer state saved with the distributed optimizer for a run without, and so on.

    ``saved`` are the arguments of the run that saved; checkpoints from elsewhere may lack them.

    Raises:
        ValueError: the run is to load the optimizer state, and it is of the other kind.
    """
    distributed = getattr(saved, "use_distributed_optimizer", None)
    unread = args.no_load_optim or args.finetune or getattr(saved, "no_save_optim", False)
    if unread or distributed in (None, args.use_distributed_optimizer):
        return
    raise ValueError(
        f"The optimizer state in {folder} was saved {'with' if distributed else 'without'} "
        f"{_FLAG}, and its two kinds do not load into each other; "
        f"{'give' if distributed else 'drop'} {_FLAG}, or load the weights alone by "
        "--no-load-optim."
    )
