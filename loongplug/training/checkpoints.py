"""How a run or a conversion deals with checkpoints: which folders are fit, how they are written."""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.training import get_args
from megatron.training.checkpointing import checkpoint_exists

from loongplug.checkpoint.atomic_saves import AtomicSaves, recover, told_to_all, write_buckets
from loongplug.checkpoint.checkpoint_files import (
    TRACKER,
    check_latest,
    replaced_whole,
    whole_checkpoints,
)
from loongplug.checkpoint.resume_checks import checked_common_state, checked_load, checked_rates
from loongplug.checkpoint.settings_notes import (
    ARCHITECTURE_FILE,
    DATA_FILE,
    check_architecture,
    check_data_note,
    write_note,
)
from loongplug.output_files import write_whole
from loongplug.platform.platforms import Platform
from loongplug.platform.replacements import as_wrapper
from loongplug.platform.upstream_saving import (
    asynchronous_save_on_cpu_table,
    synchronous_save_table,
    whole_checkpoints_table,
)
from loongplug.training.rank_data import PACKING_PLACE


def use_whole_checkpoints(
    platform: Platform,
    *,
    asynchronous: bool,
    lock: Path | None = None,
    saved: Callable[[], None] = lambda: None,
) -> None:
    """Have Megatron write checkpoints that are there whole or not at all, and check what it loads.

    ``lock`` as of :class:`AtomicSaves`. ``saved`` is called on the first rank when the tracker
    names a new one. Lasts until the platform ends.
    """
    if not asynchronous:
        platform.use(synchronous_save_table())
    elif platform.name == "cpu":
        platform.use(asynchronous_save_on_cpu_table())
    platform.use(
        whole_checkpoints_table(
            save=AtomicSaves(lock=lock).wrap,
            load=checked_load,
            common=lambda read: noted_of_run(checked_common_state(read)),
            rates=checked_rates,
            tracker=partial(replaced_whole, then=saved),
            write=write_buckets,
            finalize=told_to_all,
        )
    )


@as_wrapper
def noted_of_run(original: Any, checkpoint_dir: Any) -> Any:
    """Megatron's reading of what a checkpoint has once for all ranks, heard by the run's arguments.

    These keep the place in the stream of packs. Random numbers of modules that lay on other ranks
    are not loaded, as with another tensor or pipeline parallel size.
    """
    found, own = original(checkpoint_dir), get_args()
    saved = found.get("args")
    setattr(own, PACKING_PLACE, getattr(saved, PACKING_PLACE, None))
    if list(getattr(saved, "own_ranks", ())) != list(own.own_ranks):
        own.no_load_rng = True
    return found


def has_checkpoint(args: Namespace) -> bool:
    """Whether --load names a folder with a checkpoint, which then wins over --load-hf."""
    return bool(args.load) and checkpoint_exists(args.load)


def tracked_iteration(folder: str) -> str | None:
    """The iteration of a folder's latest checkpoint, or ``release``; None without any."""
    tracker = Path(folder) / TRACKER
    return tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else None


def goes_on(args: Namespace) -> bool:
    """Whether the run is to go on from the checkpoints in ``--save``, where there are some."""
    same = bool(args.load) and os.path.realpath(args.load) == os.path.realpath(args.save)
    return same and not args.finetune


def refuse_others_checkpoints(args: Namespace) -> None:
    """Refuse to replace another run's checkpoints. For the first rank, which has ``--save`` alone.

    ValueError where a whole one is there, and the run does not go on from those of the folder.
    """
    save = Path(args.save)
    recover(save)
    if goes_on(args) and has_checkpoint(args):
        return
    whole = whole_checkpoints(save)
    if whole != "none" and not goes_on(args):
        raise ValueError(
            f"--save {save} has checkpoints that this run does not load, and would replace: {whole}"
            ". Give another folder. Training can also go on from them: --load "
            f"{save}, without --finetune."
        )
    if whole != "none":  # killed behind its first save, or the tracker was lost
        newest = whole.partition(",")[0]
        write_whole(save / TRACKER, newest.removeprefix("iter_").lstrip("0") or "0")
        print(f"{save / TRACKER} was not there: it names {newest}.", flush=True)


def check_checkpoint_folders(
    args: Namespace, model_yaml: Mapping[str, Any], *, data: Mapping[str, Any]
) -> None:
    """As :func:`check_source_folders`, and of data's fingerprint; notes both in ``--save``."""
    check_source_folders(args, model_yaml)
    if has_checkpoint(args) and not args.finetune:
        check_data_note(Path(args.load), data)
    if args.save and args.rank == 0:
        write_note(Path(args.save) / DATA_FILE, data)
        if not (goes_on(args) and has_checkpoint(args)):  # what has no note is not ours to describe
            write_note(Path(args.save) / ARCHITECTURE_FILE, model_yaml)


def check_source_folders(args: Namespace, model_yaml: Mapping[str, Any]) -> None:
    """Mend what a killed save left in ``--load`` and ``--save``; look at what will be loaded.

    For all ranks; no collectives. The first rank looks whether the checkpoint is whole; where it is
    not, the others hear of it as of any error. ValueError for that, and for another model's.
    """
    for folder in {args.load, args.save} - {None}:
        recover(Path(folder))
    if has_checkpoint(args):
        if args.rank == 0:
            check_latest(Path(args.load), step=args.ckpt_step)
        check_architecture(Path(args.load), model_yaml)
