"""Draws that a start has to refuse: another start, a damaged checkpoint, an output.

All ranks end with one sentence before they train, and nothing is written. What a checkpoint has
whole can be gone on from; an export that fails at its end leaves a checkpoint.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attempts import FAILED, Agent, Ending
from built_in_faults import NO_SPACE
from draws import NOTES, SAVE_INTERVAL, STEPS, Draw
from fuzz_data import write_rows
from fuzzed_run import (
    judge,
    latest_checkpoint,
    require,
    require_latest,
    require_losses,
    require_told,
    require_whole,
)

from loongplug.checkpoint.save_lock import LOCK_FILE


def another_start(world: Any, draw: Draw, place: Path) -> Ending:
    """One rank has other flags, data or model: named, with the rank."""
    save, elsewhere = place / "checkpoints", place / "elsewhere"
    flags = [*world.flags(draw, draw.cell), "--save", str(save)]
    rows = "mixed" if draw.rows == "text" else "text"
    other = {
        "--lr": "2e-2",
        "--seed": "7",
        "--micro-batch-size": str(3 - draw.cell.micro_batch),
        "--train-iters": str(STEPS + 1),
        "--save": str(elsewhere),
        "--train-data-path": str(write_rows(world.folder, rows=rows, damage="")),
        "model.foundation.lr_mult": "0.5",
        "model.image_encoder.freeze": "True",
    }[draw.fault.way]
    way = draw.fault.way
    otherwise = [*flags, *((way, other) if way.startswith("--") else (f"{way}={other}",))]
    ending = world.attempt(
        place / "first", draw.cell, flags, draw=draw, agent=Agent(), otherwise=otherwise
    )
    (rank,) = draw.fault.ranks
    require_refused(ending, way.removeprefix("model."), f"rank {rank}")
    require_nothing_written(save, elsewhere)
    return ending


def damaged_checkpoint(world: Any, draw: Draw, place: Path) -> Ending:
    """What is damaged is named, is not written to, and another whole checkpoint can be loaded."""
    expected, save = world.reference(draw), place / "checkpoints"
    flags = [*world.flags(draw, draw.cell), "--save", str(save)]
    first = world.attempt(place / "first", draw.cell, flags)
    judge(draw, first, expected)
    require_whole(first, expected)
    require_latest(draw, first, STEPS)
    damaged = [
        damage(draw, save, step=step)
        for step in range(STEPS, 0, -SAVE_INTERVAL)
        if step >= draw.fault.step
    ]
    before = contents(save)
    flags = world.flags(draw, draw.resume, "--load", str(save))
    same_place = ["--save", str(save)] if draw.resume == draw.cell else []
    ending = world.attempt(place / "second", draw.resume, [*flags, *same_place])
    require_refused(ending, str(damaged[0]))
    after = contents(save)
    require(before == after, f"the run that is refused changes {sorted(before ^ after)}")
    is_note = draw.fault.way in NOTES
    if is_note:
        damaged[0].unlink()  # as the message says
    if is_note or draw.fault.step == STEPS:
        step = STEPS - SAVE_INTERVAL
        resumed = world.attempt(place / "third", draw.resume, [*flags, "--ckpt-step", str(step)])
        require_whole(resumed, {each: expected[each] for each in expected if each > step})
    return ending


def output(world: Any, draw: Draw, place: Path) -> Ending:
    """An output below a file, and an export for which there is no room at its end."""
    at_end = draw.where == "export's end"
    save, exports = place / "checkpoints", place / "exports"
    target = exports / "out"
    place.mkdir(parents=True)
    if not at_end:
        exports.write_text("a file")
    flags = [*world.flags(draw, draw.cell), "--save", str(save)]
    flags += [draw.fault.way, str(target)]
    if not at_end:
        ending = world.attempt(place / "first", draw.cell, flags)
        require_refused(ending, draw.fault.way, str(exports))
        require_nothing_written(save)
        require(exports.read_text() == "a file", f"{exports} has been changed")
        return ending
    expected = world.reference(draw)
    ending = world.attempt(place / "first", draw.cell, flags, draw=draw, save=exports)
    require(set(ending.ways) == {FAILED}, f"it ends as {ending.ways}:\n{ending.details}")
    require_losses(ending, expected)
    require_told(ending, NO_SPACE, str(save))
    require(latest_checkpoint(save) == STEPS, "there is no checkpoint of the last step")
    return ending


# What has to be refused, by the kind of fault.
REFUSED: dict[str, Callable[[Any, Draw, Path], Ending]] = {
    "other start": another_start,
    "damaged checkpoint": damaged_checkpoint,
    "output": output,
}


def damage(draw: Draw, save: Path, *, step: int) -> Path:
    """Do to the checkpoint of ``step`` what the draw says; gives what the message has to name."""
    checkpoint, way = save / f"iter_{step:07d}", draw.fault.way
    if way in NOTES:
        file = save / way
        file.write_text('["of another program"]' if draw.fault.at == 1 else "{")
        return file
    if draw.fault.place == "description":
        file = checkpoint / way
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if draw.fault.at == 1 else b"")
        return file
    files = sorted(checkpoint.glob("*.distcp"), key=lambda file: -file.stat().st_size)
    # Of what is overwritten, only what is read can be seen: the largest is.
    file = files[0 if way == "overwritten" else draw.fault.at % len(files)]
    whole = file.read_bytes()
    content = {
        "truncated": whole[:-1],
        "emptied": b"",
        "removed": None,
        "overwritten": bytes(len(whole)),
    }[way]
    if content is None:
        file.unlink()
        return Path(file.name)
    file.write_bytes(content)
    return file


def contents(save: Path) -> set[tuple[str, str]]:
    """Digests of all files but logs; a lock that is left would be one."""
    return {
        (str(file.relative_to(save)), hashlib.sha256(file.read_bytes()).hexdigest())
        for file in save.rglob("*")
        if file.is_file() and file.relative_to(save).parts[0] != "logs"
    }


def require_refused(ending: Ending, *words: str) -> None:
    """All ranks have failed before the first step, with one message that has these words."""
    require(set(ending.ways) == {FAILED}, f"it ends as {ending.ways}:\n{ending.details}")
    require(not any(ending.losses), f"it takes steps: {ending.losses}")
    require_told(ending, *words)
    for said in ending.said:
        require("Traceback" not in said, f"a rank shows a traceback:\n{said[-3000:]}")


def require_nothing_written(*folders: Path) -> None:
    """No checkpoint, no note, and no lock is left."""
    names: Sequence[str] = [
        str(file)
        for folder in folders
        for pattern in ("iter_*", "latest_*", "loongplug_*.json", LOCK_FILE)
        for file in folder.glob(pattern)
    ]
    require(not names, f"the run that is refused writes {names}")
