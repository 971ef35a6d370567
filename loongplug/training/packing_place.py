"""A checkpoint's place in a stream of packs.

How many packs were consumed does not say which samples are next: some were held back. What says
it travels in Megatron's arguments, which are part of every checkpoint and as whole as it is.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

from loongplug.data.row_plan import ResumePoint
from loongplug.data.source import LocalSource

_NAME = "loongplug_packing_place"


def note_packing_place(source: LocalSource, args: Namespace) -> None:
    """Tell ``args`` where a resumed run would go on; they know it from every microbatch on."""
    place = source.resume_point()
    assert place is not None, "only packs have such a place"
    setattr(args, _NAME, place.plain())


def packing_place(args: Namespace) -> ResumePoint | None:
    """Where the checkpoint that was loaded goes on; None without one, or when it has no packs."""
    data = getattr(args, _NAME, None)
    if data is None or data["packs"] != args.consumed_train_samples:
        return None
    return ResumePoint.of_plain(data)


def with_packing_place(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Megatron's reading of what is not a tensor, which keeps the place in the run's arguments."""

    @wraps(original)
    def load_common_state_dict(checkpoint_dir: Any) -> Any:
        from megatron.training.global_vars import get_args

        state = original(checkpoint_dir)
        setattr(get_args(), _NAME, getattr(state.get("args"), _NAME, None))
        return state

    return load_common_state_dict
