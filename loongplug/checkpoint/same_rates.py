"""The check that a resumed run goes on with the rates of its checkpoint: learning, weight decay."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

_ITERATIONS = "in samples: the iterations of {}, times the batch size"
# What Megatron compares, by its name in the scheduler's state.
_MEANS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": _ITERATIONS.format("--lr-warmup-iters"),
    "lr_decay_steps": _ITERATIONS.format("--train-iters or --lr-decay-iters"),
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_steps": _ITERATIONS.format("--train-iters"),
    "wd_incr_style": "--weight-decay-incr-style",
}


def checked_rates(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Megatron's loading of the scheduler, with the check. All ranks load the same state."""

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if not (self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler):
            check_rates(state_dict, {name: getattr(self, name) for name in _MEANS})
        original(self, state_dict)

    return load_state_dict


def check_rates(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse another course of the learning rate or the weight decay than the checkpoint's.

    Raises:
        ValueError: with all that differs, and the flags that say which to take.
    """
    differences = [
        f"{name} was {saved[name]}, is {now[name]} ({means})"
        for name, means in _MEANS.items()
        if name in saved and saved[name] != now[name]
    ]
    if differences:
        raise ValueError(
            "The course of the learning rate or weight decay is not the checkpoint's: "
            f"{'; '.join(differences)}. Give --override-opt-param-scheduler to go on with this "
            "run's flags, or --use-checkpoint-opt-param-scheduler to go on as the checkpoint's run "
            "would have."
        )
