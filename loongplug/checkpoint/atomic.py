"""Checkpoints that appear whole: written beside their place, then moved into it.

Megatron writes ``iter_0000002`` file by file into its final folder, over whatever an earlier run
left there. Here it writes into ``.saving_iter_0000002_<token>``, which one rename puts in place
when all ranks are done; only then does Megatron advance its tracker file.
"""

import functools
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loongplug.checkpoint.agreement import together
from loongplug.checkpoint.tracker import flush

SAVING = ".saving_"  # before the name of a checkpoint that is not whole
_REPLACED = ".replaced_"
# Only what has a name as given here is removed or put back.
_CHECKPOINT = r"(iter_\d+|release)"
_SAVING_NAME = re.compile(re.escape(SAVING) + _CHECKPOINT + "_[0-9a-f]+")
_REPLACED_NAME = re.compile(re.escape(_REPLACED) + _CHECKPOINT)
_FILES_OF_A_CHECKPOINT = (".metadata", "metadata.json", "common.pt")


class AtomicSaves:
    """Wraps Megatron's save of one checkpoint; knows which saves of this run are under way."""

    def __init__(self, *, lock: Path | None = None) -> None:
        """``lock`` is the first rank's, beside the checkpoints: where it is gone, so are they."""
        self._lock = lock
        self._under_way: set[Path] = set()

    def wrap(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """``save(state, checkpoint_dir, ...)`` that leaves ``checkpoint_dir`` whole or untouched.

        Collective: the default group. An asynchronous save (one that returns a request) moves
        its folder when the request is finalized, before what its caller adds to that.
        """

        @functools.wraps(save)
        def atomic_save(
            sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
        ) -> Any:
            final = Path(checkpoint_dir)
            partial = self._begin(final)
            request = save(sharded_state_dict, str(partial), *args, **kwargs)
            if request is None:
                self._finish(partial, final)
            else:
                request.add_finalize_fn(lambda: self._finish(partial, final))
            return request

        return atomic_save

    def _begin(self, final: Path) -> Path:
        """A new folder beside ``final``, the same on all ranks; what crashes left is removed.

        A new name each time: a writer that outlived its run must not write into this one.
        """
        made: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                if self._lock is not None and not self._lock.exists():
                    raise OSError(f"{final.parent} was removed or replaced since the run started")
                remove_left_overs(final.parent, keep=self._under_way)
                partial = final.with_name(f"{SAVING}{final.name}_{secrets.token_hex(4)}")
                partial.mkdir(parents=True)
                made = [str(partial), None]
            except OSError as error:
                made = [None, f"cannot make a folder for the checkpoint: {error}"]
        dist.broadcast_object_list(made, src=0)
        if made[0] is None:
            raise ValueError(made[1])
        self._under_way.add(Path(made[0]))
        return Path(made[0])

    def _finish(self, partial: Path, final: Path) -> None:
        with together(final):
            if dist.get_rank() == 0:
                put_in_place(partial, final)
        self._under_way.discard(partial)


def put_in_place(partial: Path, final: Path) -> None:
    """Give the complete folder ``partial`` its name; the checkpoint of that name before is removed.

    What others put into the older one's folder comes into the new one's. Killed between the two
    renames, it leaves the old folder aside, for ``recover``.
    """
    for file in partial.iterdir():
        if file.suffix != ".distcp":  # ranks have flushed those that they wrote
            flush(file)
    flush(partial)
    aside = final.with_name(_REPLACED + final.name)
    if final.exists() and any(final.iterdir()):
        _remove_replaced(aside, final)
        final.rename(aside)
    partial.rename(final)  # over an empty folder, too
    flush(final.parent)
    _remove_replaced(aside, final)


def recover(folder: Path) -> None:
    """Put back a checkpoint that was moved aside by a run that died before replacing it.

    For all ranks, before they look at ``folder``; no collectives: the first rank does it.
    """
    for aside, final in _set_aside(folder):
        with suppress(OSError):  # another rank was first
            if not final.exists() or not any(final.iterdir()):
                aside.rename(final)


def remove_left_overs(folder: Path, *, keep: set[Path]) -> None:
    """Remove what saves left that never ended, but for the folders in ``keep``."""
    for partial in folder.glob(f"{SAVING}*"):
        if partial not in keep and _SAVING_NAME.fullmatch(partial.name):
            shutil.rmtree(partial)
    for aside, final in _set_aside(folder):
        if final.exists():
            _remove_replaced(aside, final)


def _set_aside(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The older checkpoints that were moved aside, and where they were."""
    for aside in folder.glob(f"{_REPLACED}*"):
        if _REPLACED_NAME.fullmatch(aside.name):
            yield aside, folder / aside.name.removeprefix(_REPLACED)


def _remove_replaced(aside: Path, final: Path) -> None:
    """Remove an older checkpoint, but for what others put there, which moves into ``final``."""
    if aside.is_symlink():
        aside.unlink()
        return
    if not aside.exists():
        return
    for path in list(aside.iterdir()):
        own = path.suffix == ".distcp" or path.name in _FILES_OF_A_CHECKPOINT
        if not own and not os.path.lexists(final / path.name):
            path.rename(final / path.name)
    shutil.rmtree(aside)
