"""Runs a draw on forked ranks and judges how it ended.

Every run has to end by itself, in one of two ways: with the losses of the single rank that
nothing happens to, or with one error on all ranks and a checkpoint that training goes on from.
"""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attempts import FAILED, TERMINATED, WHOLE, Ending, attempt
from built_in_faults import MESSAGE, NO_SPACE
from draws import ALONE, EXTRAS, FREEZES, MODES, SAVE_INTERVAL, STEPS, Draw, Fault, Layout
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
    _weights: Path | None = None
    _references: dict[tuple[str, str, str], Losses] = field(default_factory=dict)
    _runs: int = 0

    def beside(self, slot: int) -> "World":
        """One for another process, which begins with the same data and weights."""
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
        ending = self._attempt(place / "first", draw.layout, flags, draw=draw, save=save)
        judge(draw, ending, expected)
        latest = latest_checkpoint(save)
        require_latest(draw, ending, latest)
        if 0 < latest < STEPS:
            flags = self.flags(draw, draw.resume, draw.resume_mode, "--load", str(save))
            saves = draw.resume == draw.layout
            flags += ["--save", str(save)] * saves
            resumed = self._attempt(place / "second", draw.resume, flags)
            require_whole(resumed, {step: expected[step] for step in expected if step > latest})
            left = sorted(path.name for path in save.glob(".*"))
            require(not saves or not left, f"the next run's saves leave {left} where they are")
        return ending

    def _attempt(self, place: Path, layout: Layout, flags: list[str], **options: Any) -> Ending:
        return attempt(place, layout, flags, prepared=self._prepared, **options)

    def reference(self, draw: Draw) -> Losses:
        """Of the single rank on the same data, with the same freeze; made once."""
        key = draw.rows, draw.damage, draw.freeze
        if key not in self._references:
            plain = Draw(
                layout=ALONE,
                mode="uniform",
                rows=draw.rows,
                damage=draw.damage,
                freeze=draw.freeze,
                extras=(),
                micro_batch=2,
                fault=Fault(),
                resume=ALONE,
                resume_mode="uniform",
            )
            flags = self.flags(plain, ALONE, "uniform")
            losses = self._alone("reference", flags).losses[0]
            require(losses[STEPS] < losses[1], f"the reference does not learn: {losses}")
            self._references[key] = losses
        return self._references[key]

    def flags(self, draw: Draw, layout: Layout, mode: str, *more: str) -> list[str]:
        """A run's; bad samples are skipped, unless ``more`` has it otherwise."""
        data = write_rows(self.folder, rows=draw.rows, damage=draw.damage)
        return [
            *base_flags(self.folder),
            *("--train-data-path", str(data), "--load-hf", str(self.weights())),
            *("--micro-batch-size", str(draw.micro_batch), "--bad-sample", "skip"),
            *layout.flags(),
            *MODES[mode],
            *FREEZES[draw.freeze],
            *(
                flag
                for name in draw.extras
                if name != "overlap" or layout.ranks > 1
                for flag in EXTRAS[name]
            ),
            *more,
        ]

    def weights(self) -> Path:
        """A Hugging Face folder that all runs begin with."""
        if self._weights is None:
            weights = self.folder / "weights"
            data = write_rows(self.folder, rows="mixed", damage="")
            flags = [*base_flags(self.folder), "--train-data-path", str(data)]
            flags += ["--lr", "0", "--train-iters", "1", "--save-hf", str(weights)]
            self._alone("first weights", flags)
            self._weights = weights
        return self._weights

    def _alone(self, name: str, flags: list[str]) -> Ending:
        ending = self._attempt(self.folder / f"{self.name}{name}", ALONE, flags)
        require(ending.ways == [WHOLE], f"the {name} run ends as {ending.ways}\n{ending.details}")
        self._prepared.modules(
            json.loads((self.folder / f"{self.name}{name}" / "modules").read_text())
        )
        shutil.rmtree(self.folder / f"{self.name}{name}")
        return ending


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
