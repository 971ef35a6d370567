"""The check that a resumed run goes on with the rates of its checkpoint: learning, weight decay.

A run that is made longer needs no flag: the end of the course moves, and one line says so.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist

from loongplug.parallel.parameter_groups import SavedRates

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


_ENDS = ("lr_decay_steps", "wd_incr_steps")
_FLAGS = (
    "Give --override-opt-param-scheduler to go on with this run's flags, or "
    "--use-checkpoint-opt-param-scheduler to go on as the checkpoint's run would have."
)


def checked_rates(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Megatron's loading of the scheduler, with the check, after that of the optimizer.

    Modules' own learning rates go by the same flags. All ranks load the same state.
    """

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        longer: dict[str, Any] = {}
        modules = getattr(self.optimizer, "saved_rates", ())
        if self.use_checkpoint_opt_param_scheduler:
            check_known(modules)
            if modules:
                self.optimizer.use_saved_rates()
        elif not self.override_opt_param_scheduler:
            now = {name: getattr(self, name) for name in _MEANS}
            longer = lengthened(state_dict, now)
            check_rates({**state_dict, **longer}, now, modules)
        original(self, {**state_dict, **longer})
        # Upstream has set the groups' weight decay before it took the checkpoint's.
        self.step(increment=0)
        if "lr_decay_steps" in longer and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"loongplug: {_new_course(self, state_dict)}", file=sys.stderr, flush=True)

    return load_state_dict


def lengthened(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the course that now end later; none where others have changed, too.

    A warm-up that has ended in both may differ: its length may be a share of the course's.
    """
    changed = {name for name in _MEANS if name in saved and saved[name] != now[name]}
    longer = {name for name in _ENDS if name in changed and now[name] > saved[name]}
    warm_ups = (saved.get("lr_warmup_steps", 0), now["lr_warmup_steps"])
    if longer and saved.get("num_steps", 0) >= max(warm_ups):
        longer |= changed & {"lr_warmup_steps"}
    return {name: now[name] for name in longer}


def _new_course(now: Any, saved: Mapping[str, Any]) -> str:
    before = copy.copy(now)
    for name in _MEANS.keys() & saved.keys():
        setattr(before, name, saved[name])
    rates = [f"{each.get_lr({}):.3g}" for each in (before, now)]
    went_on = f"at {rates[1]}, where it was" if rates[0] == rates[1] else "at {1}, and was {0}"
    return (
        "the run is longer than the checkpoint's: the learning rate's course"
        f" ({now.lr_decay_style}) ends at sample {now.lr_decay_steps:,}, not"
        f" {saved['lr_decay_steps']:,}; it goes on {went_on.format(*rates)}."
    )


def check_rates(
    saved: Mapping[str, Any], now: Mapping[str, Any], modules: Sequence[SavedRates] = ()
) -> None:
    """Refuse another course of the learning rate or the weight decay than the checkpoint's.

    Raises:
        ValueError: with all that differs, and the flags that say which to take.
    """
    differences = [
        f"{name} was {saved[name]}, is {now[name]} ({means})"
        for name, means in _MEANS.items()
        if name in saved and saved[name] != now[name]
    ]
    rates = [(name, saved.get(name, now[name]), now[name]) for name in ("max_lr", "min_lr")]
    if all(before == after for _, before, after in rates):  # else modules follow
        differences += dict.fromkeys(
            f"{name} of {each.module} was {_told(each.saved, which)}, is {each.own[which]} "
            "(its lr_mult, or --decoupled-lr)"
            for each in modules
            for which, (name, *_) in enumerate(rates)
            if each.saved is None or each.saved[which] != each.own[which]
        )
    if differences:
        raise ValueError(
            "The course of the learning rate or weight decay is not the checkpoint's: "
            f"{'; '.join(differences)}. {_FLAGS}"
        )


def check_known(modules: Sequence[SavedRates]) -> None:
    """Refuse to go on with the checkpoint's rates where it does not tell them.

    Raises:
        ValueError: with the modules.
    """
    unknown = dict.fromkeys(each.module for each in modules if each.saved is None)
    if unknown:
        raise ValueError(
            f"The checkpoint does not tell the learning rate of {', '.join(unknown)}: its groups "
            "of parameters have several rates, or other weight decay. Give "
            "--override-opt-param-scheduler to go on with this run's."
        )


def _told(saved: tuple[float, float] | None, which: int) -> Any:
    return "not told" if saved is None else saved[which]
