"""Which checkpoints of a run stay in its folder: the newest, and the best by validation loss."""

import json
import math
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from loongplug.checkpoint.atomic_saves import SAVING
from loongplug.checkpoint.checkpoint_files import TRACKER, is_complete
from loongplug.checkpoint.settings_notes import write_note

LOSSES_FILE = "loongplug_validation.json"


def to_remove(
    iterations: Iterable[int], losses: Mapping[int, float], *, newest: int, keep: int
) -> list[int]:
    """The checkpoints that go once that of iteration ``newest`` is there. Pure.

    ``keep`` of them stay, the latest, and the one with the lowest of ``losses``, by iteration; of
    equals the latest. What comes behind ``newest`` is of another attempt and is left alone.
    """
    upto = sorted(iteration for iteration in iterations if iteration <= newest)
    scored = [each for each in upto if math.isfinite(losses.get(each, math.nan))]
    best = min(scored, key=lambda each: (losses[each], -each), default=None)
    return [each for each in upto[:-keep] if each != best]


class CheckpointRetention:
    """Removes what ``--keep-checkpoints`` leaves out, each time the tracker names a new one.

    The first rank's; no collectives. The validation losses are noted beside the checkpoints, for
    runs that go on.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._losses = _noted(folder / LOSSES_FILE)
        self._own: set[int] = set()  # evaluated in this run

    def evaluated(self, iteration: int, loss: float) -> None:
        """Note the validation loss that the weights of this iteration have."""
        self._own.add(iteration)
        self._losses[iteration] = loss
        self._note()

    def prune(self) -> None:
        """Remove what does not stay; what cannot be removed is told, and ends no run."""
        text = (self._folder / TRACKER).read_text(encoding="utf-8").strip()
        if not text.isdecimal():
            return
        newest = int(text)
        if newest not in self._own:  # an earlier attempt's weights had that loss
            self._losses.pop(newest, None)
        there = {
            int(path.name[5:]): path
            for path in self._folder.glob("iter_*")
            if path.name[5:].isdecimal() and is_complete(path)
        }
        for each in to_remove(there, self._losses, newest=newest, keep=self._keep):
            self._losses.pop(each, None)
            # Under the name of a save that never ended: killed meanwhile, the next save removes it.
            gone = there[each].with_name(f"{SAVING}{there[each].name}_{secrets.token_hex(4)}")
            try:
                there[each].rename(gone)
                shutil.rmtree(gone)
            except OSError as error:
                _tell(f"{there[each]} cannot be removed: {error}")
        self._note()

    def _note(self) -> None:
        path = self._folder / LOSSES_FILE
        try:
            write_note(path, self._losses)
        except OSError as error:
            _tell(f"{path} cannot be written: {error}")


def _tell(problem: str) -> None:
    print(f"loongplug: {problem}", file=sys.stderr, flush=True)


def _noted(path: Path) -> dict[int, float]:
    """The losses of runs before; none where the note is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {int(iteration): float(loss) for iteration, loss in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
