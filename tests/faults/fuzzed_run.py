"""Runs a draw on forked ranks and judges how it ended.

Every run has to end by itself, in one of two ways: with the losses of the single rank that
nothing happens to, or with one error on all ranks and a checkpoint that training goes on from.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attempts import FAILED, TERMINATED, WHOLE, Agent, Ending, attempt
from built_in_faults import MESSAGE, NO_SPACE
from drawn_options import ALONE, MODELS, TRAINS, VISION, Layout, extra_flags, mode_flags
from draws import SAVE_INTERVAL, STEPS, Draw, Fault
from fuzz_data import base_flags, place_of_damage, write_rows
from prepared import Prepared

from loongplug.checkpoint.tracker import TRACKER

# How gloo tells that a peer is gone.
PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")
TOLERANCE = 2e-5  # what fp32 sums in another order may differ by, as a part of the loss

Losses = dict[int, float]  # by step


class WrongEndError(AssertionError):
    """A draw that did not end as every run has to."""


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
        expected = self.reference(draw)
        save = place / "checkpoints"
        policy = "fatal" if draw.fault.kind == "bad sample" else "skip"
        flags = self.flags(draw, draw.layout, draw.mode, "--bad-sample", policy)
        flags += ["--save", str(save)]
        agent = Agent() if draw.restart else None
        if agent:
            flags += ["--load", str(save)]
        options = {"draw": draw, "save": save, "agent": agent}
        ending = self._attempt(place / "first", draw.layout, flags, **options)
        judge(draw, ending, expected)
        latest = latest_checkpoint(save)
        require_latest(draw, ending, latest)
        if agent and FAILED in ending.ways:
            resumed = self._attempt(place / "second", draw.layout, flags, agent=agent)
        elif 0 < latest < STEPS:
            flags = self.flags(draw, draw.resume, draw.resume_mode, "--load", str(save))
            flags += ["--save", str(save)] * (draw.resume == draw.layout)
            resumed = self._attempt(place / "second", draw.resume, flags)
        else:
            return ending
        require_whole(resumed, {step: expected[step] for step in expected if step > latest})
        left = sorted(path.name for path in save.glob(".*"))
        saves = "--save" in flags and latest < STEPS
        require(not saves or not left, f"the next run's saves leave {left} where they are")
        return ending

    def _attempt(self, place: Path, layout: Layout, flags: list[str], **options: Any) -> Ending:
        return attempt(place, layout, flags, prepared=self._prepared, **options)

    def reference(self, draw: Draw) -> Losses:
        """Of the single rank on the same data that trains the same; made once."""
        name = "-".join((draw.model, draw.rows, draw.damage, draw.trains)).replace(" ", "-")
        plain = Draw(
            layout=ALONE,
            mode="uniform",
            model=draw.model,
            rows=draw.rows,
            damage=draw.damage,
            trains=draw.trains,
            extras=(),
            micro_batch=2,
            fault=Fault(),
            resume=ALONE,
            resume_mode="uniform",
        )
        found = self._alone(f"reference-{name}", lambda: self.flags(plain, ALONE, "uniform"))
        losses = {int(step): loss for step, loss in found.items()}
        # A single image does not lower the loss of all.
        learns = draw.rows != "lone" or draw.trains not in VISION
        require(not learns or losses[STEPS] < losses[1], f"the {name} run does not learn: {losses}")
        return losses

    def flags(self, draw: Draw, layout: Layout, mode: str, *more: str) -> list[str]:
        """A run's; bad samples are skipped, unless ``more`` has it otherwise."""
        data = write_rows(self.folder, rows=draw.rows, damage=draw.damage)
        return [
            *base_flags(self.folder, model=MODELS[draw.model]),
            *("--train-data-path", str(data), "--load-hf", str(self.weights(draw.model))),
            *("--micro-batch-size", str(draw.micro_batch), "--bad-sample", "skip"),
            *layout.flags(),
            *mode_flags(mode, layout),
            *extra_flags(draw.extras, model=draw.model, layout=layout, mode=mode),
            *TRAINS[draw.trains],  # patterns, up to the next flag
            *more,
        ]

    def weights(self, model: str) -> Path:
        """A Hugging Face folder that all runs of a model begin with."""
        weights = self.folder / f"weights-{model}"

        def flags() -> list[str]:
            data = write_rows(self.folder, rows="mixed", damage="")
            base = base_flags(self.folder, model=MODELS[model])
            base += ["--train-data-path", str(data), "--lr", "0", "--train-iters", "1"]
            return [*base, "--save-hf", str(weights)]

        self._alone(f"first-{weights.name}", flags)
        return weights

    def _alone(self, name: str, flags: Callable[[], list[str]]) -> dict[str, float]:
        """Losses of a single rank, whose run is made once for all worlds in the folder."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            place = self.folder / f"{self.name}{name}"
            ending = self._attempt(place, ALONE, flags())
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


def judge(draw: Draw, ending: Ending, expected: Losses) -> None:
    """Whether a run may end so."""
    for losses in ending.losses:
        beginning = {step: expected[step] for step in losses}
        require(
            list(losses) == list(range(1, len(losses) + 1)) and same(losses, beginning),
            f"the run has the losses {losses}, expected {beginning}",
        )
    lengths = [len(losses) for losses in ending.losses]
    require(max(lengths) - min(lengths) <= 1, f"the ranks took {lengths} steps")
    happened = ending.fired or draw.fault.kind == "bad sample"
    ways = set(ending.ways)
    if ways == {WHOLE}:
        require(lengths == [STEPS] * len(lengths), f"the run ends after {lengths} steps")
        require(
            not happened or draw.fault.kind == "sigterm",
            f"the run goes on as if there were no {draw.fault.kind}",
        )
        return
    require(happened, f"nothing happens, but the run ends as {ending.ways}:\n{ending.details}")
    if draw.fault.kind == "sigterm":
        require(ways == {TERMINATED}, f"SIGTERM ends it as {ending.ways}:\n{ending.details}")
        return
    victims = draw.fault.ranks if draw.fault.kind == "kill" else ()
    require(
        all(
            way == FAILED
            or (rank in victims and way == "SIGKILL")
            or (victims and draw.fault.place == "build" and way in ("SIGTERM", "SIGKILL"))
            for rank, way in enumerate(ending.ways)
        ),
        f"it ends as {ending.ways}:\n{ending.details}",
    )
    require_one_error(draw, ending)


def require_one_error(draw: Draw, ending: Ending) -> None:
    """All ranks say the same."""
    kind = draw.fault.kind
    for rank, said in enumerate(ending.said):
        if ending.ways[rank] != FAILED:
            continue
        lines = [line for line in said.splitlines() if "loongplug: error [rank" in line]
        # What raise_together says stands on several lines.
        tail = said[said.find(lines[-1]) :] if lines else ""
        require(len(lines) == 1, f"rank {rank} has {len(lines)} error lines:\n{said[-3000:]}")
        known = {
            "exception": (MESSAGE,),
            "full disk": (NO_SPACE,),
            "bad sample": (f".jsonl:{place_of_damage() + 1}",),
            "kill": PEER_IS_GONE,
        }[kind]
        require(
            any(text in tail for text in known),
            f"rank {rank} does not tell of the {kind}:\n{said[-3000:]}",
        )


def require_latest(draw: Draw, ending: Ending, latest: int) -> None:
    """The tracker names the last checkpoint that the run can have come to."""
    steps = max(len(losses) for losses in ending.losses)
    if TERMINATED in ending.ways:
        require(latest == steps, f"SIGTERM in step {steps} leaves {latest} as the latest")
        return
    # A report comes before its step's save; the next step's, after it.
    saves = [step for step in range(steps + 1) if step % SAVE_INTERVAL == 0]
    sure = [step for step in saves if step < steps or set(ending.ways) == {WHOLE}]
    if "async save" in draw.extras and set(ending.ways) != {WHOLE}:
        sure = sure[:-1]  # the last one may be under way
    allowed = {*saves[-2:], 0} if not sure else {step for step in saves if step >= sure[-1]}
    require(latest in allowed, f"after {steps} steps the latest is {latest}, not of {allowed}")


def require_whole(ending: Ending, expected: Losses) -> None:
    """The run comes to its end, with these losses."""
    require(
        set(ending.ways) == {WHOLE},
        f"the run that resumes ends as {ending.ways}:\n{ending.details}",
    )
    for losses in ending.losses:
        require(
            losses.keys() == expected.keys() and same(losses, expected),
            f"the run that resumes has the losses {losses}, expected {expected}",
        )


def latest_checkpoint(save: Path) -> int:
    """As the tracker has it; 0 for none."""
    tracker = save / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def same(found: Losses, expected: Losses) -> bool:
    """But for rounding."""
    return all(abs(found[step] / expected[step] - 1) < TOLERANCE for step in expected)


def require(holds: bool, text: str) -> None:
    """Raise WrongEndError where it does not hold."""
    if not holds:
        raise WrongEndError(text)
