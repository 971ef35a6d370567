"""Runs a draw on forked ranks, has it judged, and goes on from its checkpoint.

Every run has to end by itself, in one of two ways: with the losses of the single rank that
nothing happens to, or with one error on all ranks and a checkpoint that training goes on from.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attempts import FAILED, WHOLE, Agent, Ending, Losses, attempt
from drawn_cells import VISION, extra_flags, goes_on_as, layouts_of
from draws import ALONE, STEPS, Draw
from fuzz_data import base_flags, write_rows
from fuzzed_run import (
    WrongEndError,
    judge,
    latest_checkpoint,
    require,
    require_latest,
    require_whole,
)
from parity.cells import TWO, Cell
from prepared import Prepared
from refused import REFUSED

from loongplug.checkpoint.checkpoint_files import is_complete


@dataclass
class World:
    """A folder with data, weights and reference losses for any number of draws."""

    folder: Path
    name: str = ""  # before the names of its own folders
    _prepared: Prepared = field(default_factory=Prepared)
    _runs: int = 0

    def beside(self, slot: int) -> "World":
        """One for another process, which shares the folder."""
        return replace(self, name=f"{slot}-")

    def check(self, draw: Draw) -> Ending:
        """Run it, judge it, go on from its checkpoint.

        Raises WrongEndError, with how to run it again.
        """
        place = self.folder / f"{self.name}run{self._runs}"
        self._runs += 1
        try:
            ending = self._checked(draw, place)
        except Exception as error:
            raise WrongEndError(
                f"{error}\nthis run again:\n  ./scripts/fuzz.sh --draw '{draw.to_json()}'"
            ) from error
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return ending

    def _checked(self, draw: Draw, place: Path) -> Ending:
        if draw.fault.kind in REFUSED:
            return REFUSED[draw.fault.kind](self, draw, place)
        expected = self.reference(draw)
        save = place / "checkpoints"
        policy = "fatal" if draw.fault.kind == "bad sample" else "skip"
        flags = self.flags(draw, draw.cell, "--bad-sample", policy)
        flags += ["--save", str(save)]
        agent = Agent() if draw.restart else None
        if agent:
            flags += ["--load", str(save)]
        options = {"draw": draw, "save": save, "agent": agent}
        ending = self.attempt(place / "first", draw.cell, flags, **options)
        judge(draw, ending, expected)
        latest = latest_checkpoint(save)
        require_latest(draw, ending, latest)
        if agent and FAILED in ending.ways:
            # Ended between its first save and the tracker: the run names the checkpoint itself.
            whole = [int(each.name[5:]) for each in save.glob("iter_*") if is_complete(each)]
            latest = latest or max(whole, default=0)
            resumed = self.attempt(place / "second", draw.cell, flags, agent=agent)
        elif 0 < latest < STEPS:
            flags = self.flags(draw, draw.resume, "--load", str(save))
            flags += ["--save", str(save)] * (draw.resume == draw.cell)
            resumed = self.attempt(place / "second", draw.resume, flags)
        else:
            return ending
        require_whole(resumed, {step: expected[step] for step in expected if step > latest})
        left = sorted(path.name for path in save.glob(".*"))
        saves = "--save" in flags and latest < STEPS
        require(not saves or not left, f"the next run's saves leave {left} where they are")
        return ending

    def attempt(self, place: Path, cell: Cell, flags: list[str], **options: Any) -> Ending:
        """One run in the folder ``place``."""
        return attempt(place, cell, flags, prepared=self._prepared, **options)

    def reference(self, draw: Draw) -> Losses:
        """Of the single rank on the same data that trains the same; made once."""
        (alone,) = layouts_of(draw.cell.model, 1)
        cell = replace(goes_on_as(draw.cell, alone), optimizer="plain", micro_batch=1)
        plain = Draw(cell=cell, rows=draw.rows, damage=draw.damage)
        name = "-".join((cell.name, draw.rows, draw.damage))
        found = self._alone(f"reference-{name}", lambda: self.flags(plain, cell))
        losses = {int(step): loss for step, loss in found.items()}
        # A single image does not lower the loss of all.
        learns = draw.rows != "lone" or draw.cell.trained != VISION
        require(not learns or losses[STEPS] < losses[1], f"the {name} run does not learn: {losses}")
        return losses

    def flags(self, draw: Draw, cell: Cell, *more: str) -> list[str]:
        """A run's; bad samples are skipped, unless ``more`` has it otherwise."""
        model = cell.model
        data = write_rows(self.folder, rows=draw.rows, damage=draw.damage, hears=model == TWO)
        return [
            *base_flags(self.folder, model=model),
            *("--train-data-path", str(data), "--load-hf", str(self.weights(model))),
            *("--micro-batch-size", str(cell.micro_batch), "--bad-sample", "skip"),
            *cell.shared_flags(),  # patterns, up to the next flag
            *cell.flags(),
            *extra_flags(draw.extras, cell),
            *more,
        ]

    def weights(self, model: str) -> Path:
        """A Hugging Face folder that all runs of a model begin with."""
        weights = self.folder / f"weights-{model}"

        def flags() -> list[str]:
            data = write_rows(self.folder, rows="mixed", damage="", hears=model == TWO)
            base = base_flags(self.folder, model=model)
            base += ["--train-data-path", str(data), "--lr", "0", "--train-iters", "1"]
            return [*base, "--save-hf", str(weights)]

        self._alone(f"first-{weights.name}", flags)
        return weights

    def _alone(self, name: str, flags: Callable[[], list[str]]) -> dict[str, float]:
        """Losses of a single rank, whose run is made once for all worlds in the folder."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            place = self.folder / f"{self.name}{name}"
            ending = self.attempt(place, ALONE, flags())
            require(
                ending.ways == [WHOLE], f"the {name} run ends as {ending.ways}\n{ending.details}"
            )
            modules = json.loads((place / "modules").read_text())
            shutil.rmtree(place)
            part = self.folder / f"{self.name}{name}.part"
            part.write_text(json.dumps([ending.losses[0], modules]))
            part.rename(file)
        losses, modules = json.loads(file.read_text())
        self._prepared.modules(modules)
        return losses
