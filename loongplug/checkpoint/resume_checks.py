"""The checks that a checkpoint fits the run that loads it: weights, optimizer, and its rates.

They need no note beside the checkpoint, and see what Megatron passes over: tensors that the model
lacks, vocabularies of another size, optimizer state of another kind. Of the course of the learning
rate and the weight decay, a flag says which values count; a run that is made longer needs none: the
end of the course moves, and one line says so.
"""

import copy
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from loongplug.checkpoint.checkpoint_files import description, told_of_damage
from loongplug.checkpoint.common_errors import of_all_ranks, together
from loongplug.checkpoint.settings_notes import refuse_differences
from loongplug.parallel.parameter_groups import SavedRates
from loongplug.platform.replacements import as_wrapper
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
_SAY_WHICH = (
    "Give --override-opt-param-scheduler to go on with this run's flags, or "
    "--use-checkpoint-opt-param-scheduler to go on as the checkpoint's run would have."
)


@as_wrapper
def checked_load(
    original: Any, sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's load of one checkpoint, after the check.

    ``--dist-ckpt-strictness`` with another value than its default leaves the check out: then the
    user has said what to do about differences.

    Collective: the default group. Raises ValueError, on every rank, with the first differences;
    on the ranks that read it, with a file that turns out to be damaged.
    """
    strict = kwargs.get("strict", "assume_ok_unexpected")
    if getattr(strict, "value", strict) == "assume_ok_unexpected":
        check_same_tensors(sharded_state_dict, Path(checkpoint_dir))
        check_trained_tensors(sharded_state_dict, Path(checkpoint_dir))
    with told_of_damage(Path(checkpoint_dir)):
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def check_same_tensors(sharded_state_dict: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint's folder whose weights differ in name or shape from the model's.

    Collective: the default group. Raises ValueError, on every rank, with the first differences.
    """
    wanted = _wanted(sharded_state_dict, _MODEL_CHUNK)
    with together():
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
    wanted = _wanted(sharded_state_dict, _OPTIMIZER_ENTRY)
    with together():
        missing = sorted(wanted.keys() - saved_tensors(folder)) if wanted else []
        if missing:
            names = list(dict.fromkeys(_STATE.sub("", name) for name in missing))
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"The checkpoint in {folder} has no optimizer state for {shown}: frozen when "
                f"it was saved, trained here. {ANEW}"
            )


def _wanted(sharded_state_dict: Mapping[str, Any], entries: re.Pattern[str]) -> Shapes:
    """What the state's ``entries`` of all ranks are to be loaded from, by name, with whole shapes.

    Collective: the default group.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    with together():
        chunks = {key: value for key, value in sharded_state_dict.items() if entries.fullmatch(key)}
        preprocessed, *_ = load_preprocess(chunks)
        mine = {
            value.key: tuple(value.global_shape)
            for value in nested_values(preprocessed)
            if isinstance(value, ShardedTensor)
        }
    return {name: shape for shapes in of_all_ranks(mine) for name, shape in shapes.items()}


def saved_tensors(folder: Path) -> dict[str, Any]:
    """torch's description (size and properties) of each tensor of a ``torch_dist`` checkpoint."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with told_of_damage(folder):
        entries = description(folder).state_dict_metadata
    return {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}


@as_wrapper
def checked_common_state(original: Any, checkpoint_dir: Any) -> Any:
    """Megatron's reading of what is not a tensor, which comes first in a load, with the check.

    No collectives; all ranks read the same, and so raise the same ValueError.
    """

    from megatron.training.global_vars import get_args

    checkpoint = Path(checkpoint_dir)
    with told_of_damage(checkpoint):
        state = _read(original, checkpoint)
    check_optimizer(state.get("args"), get_args(), folder=checkpoint)
    return state


def _read(original: Callable[[Any], Any], checkpoint: Path) -> dict[str, Any]:
    alone = checkpoint / COMMON_STATE_FNAME  # what older checkpoints have it in
    try:
        state: dict[str, Any] = original(checkpoint)
    except Exception as error:  # damaged bytes raise nearly anything
        if not alone.is_file() or isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError.unreadable(alone, error) from error
    return state


def check_optimizer(saved: Namespace | None, args: Namespace, *, folder: Path) -> None:
    """Refuse optimizer state saved with the distributed optimizer for a run without, and so on.

    ``saved`` are the arguments of the run that saved; checkpoints from elsewhere may lack them.
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


@as_wrapper
def checked_rates(original: Any, self: Any, state_dict: Any) -> None:
    """Megatron's loading of the scheduler, with the check, after that of the optimizer.

    Modules' own learning rates go by the same flags. All ranks load the same state.
    """
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
    """Refuse another course of the learning rate or the weight decay than the checkpoint's."""
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
            f"{'; '.join(differences)}. {_SAY_WHICH}"
        )


def check_known(modules: Sequence[SavedRates]) -> None:
    """Refuse to go on with the checkpoint's rates where it does not tell them."""
    unknown = dict.fromkeys(each.module for each in modules if each.saved is None)
    if unknown:
        raise ValueError(
            f"The checkpoint does not tell the learning rate of {', '.join(unknown)}: its groups "
            "of parameters have several rates, or other weight decay. Give "
            "--override-opt-param-scheduler to go on with this run's."
        )


def _told(saved: tuple[float, float] | None, which: int) -> Any:
    return "not told" if saved is None else saved[which]
