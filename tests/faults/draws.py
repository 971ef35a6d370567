"""What a fuzzed run is: a choice of options, and what goes wrong in it. Pure.

``drawn`` makes a draw out of choices. Whoever calls it brings the choices: hypothesis in the
tests, a seeded generator in ``fuzz_runs.py``. A draw is written and read as one line of JSON.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from drawn_options import (
    ALONE,
    COMMON,
    DAMAGES,
    EXTRAS,
    MODELS,
    ROWS,
    TRAINS,
    Layout,
    can_have,
    comm_types,
    is_full,
    layouts_of,
    modes_of,
    own_layouts_of,
)

Choose = Callable[[Sequence[Any]], Any]  # one of them

STEPS = 4
SAVE_INTERVAL = 2
GLOBAL_BATCH = 8
DAMAGED_STEP = 3

PLACES = (
    *("build", "data", "unit", "encoder", "decoder", "exchange", "backward", "optimizer"),
    *("save", "saved"),
)
WAYS = ("open", "write", "flush")  # where a full disk shows
# In what one rank is started otherwise than the others, by the kind of setting.
OTHER_STARTS = {
    "a flag": ("--lr", "--seed", "--micro-batch-size", "--train-iters", "--save"),
    "its data": ("--train-data-path",),
    "its model": ("model.foundation.lr_mult", "model.image_encoder.freeze"),
}
# What becomes of a checkpoint between two runs: of files of tensors, and of what describes them.
CHECKPOINT_DAMAGES = {
    "tensors": ("truncated", "emptied", "removed", "overwritten"),
    "description": (
        *(".metadata", "metadata.json"),
        *("loongplug_data.json", "loongplug_architecture.json"),
    ),
}
NOTES = CHECKPOINT_DAMAGES["description"][2:]  # beside the checkpoints
# Outputs that cannot be written: at the start, and an export for which the disk is full at its end.
OUTPUTS = {
    "outputs": ("--save", "--metrics-json", "--trace", "--save-hf", "--save-lora"),
    "export's end": ("--save-hf",),
}
# What can happen: each kind, with the places (ways, damages) that it is drawn at. A signal before
# training is set up ends a process in the ordinary way: that is a kill.
HAPPENINGS: dict[str, tuple[str, ...]] = {
    "none": ("",),
    "exception": PLACES,
    "kill": PLACES,
    "full disk": WAYS,
    "sigterm": PLACES[1:],
    "bad sample": DAMAGES,
    "other start": tuple(OTHER_STARTS),
    "damaged checkpoint": tuple(CHECKPOINT_DAMAGES),
    "output": tuple(OUTPUTS),
}
# What nobody built into a rank: it is there before the run begins, or in its data.
UNFIRED = ("bad sample", "other start", "damaged checkpoint", "output")
# After these torchrun starts a run again.
RESTARTED = ("exception", "kill", "full disk")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, where and when.

    ``kind``: one of HAPPENINGS. ``ranks``: those that it happens to. It happens at the ``at``-th
    time, counted from the beginning of ``step`` (for the disk, from the save after it), that a
    rank comes to ``place`` (or meets the disk in ``way``).

    Of another start, a damaged checkpoint and an output, ``place`` is of what kind they are and
    ``way`` which; checkpoints from that of ``step`` on are damaged, in the ``at``-th file.
    """

    kind: str = "none"
    ranks: tuple[int, ...] = ()
    place: str = ""
    way: str = ""
    step: int = 1
    at: int = 1


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One fuzzed run. ``resume`` is the layout in which it goes on afterwards.

    ``restart``: the same command line goes on, as torchrun has it, from a checkpoint or without
    one. ``packed``: all rows are packs.
    """

    layout: Layout = ALONE
    mode: str = "uniform"
    model: str = "dense"
    rows: str = "mixed"
    damage: str = ""  # "" for none; met with --bad-sample skip, unless that is the fault
    trains: str = "everything"
    extras: tuple[str, ...] = ()
    micro_batch: int = 2
    fault: Fault = Fault()
    resume: Layout = ALONE
    resume_mode: str = "uniform"
    restart: bool = False
    packed: bool = False

    @property
    def where(self) -> str:
        """Of HAPPENINGS, what its kind happens at."""
        return (
            self.damage if self.fault.kind == "bad sample" else self.fault.place or self.fault.way
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse."""
        data = json.loads(text)
        for name in ("layout", "resume"):
            data[name] = Layout(**data[name])
        fault = data["fault"]
        data["fault"] = Fault(**{**fault, "ranks": tuple(fault["ranks"])})
        return cls(**{**data, "extras": tuple(data["extras"])})


_RANKS = (*(1,) * 4, *(2,) * 6, 3, 4, 4)
_LARGE_RANKS = (1, 2, 3, 4)


def drawn(choose: Choose, *, large: bool = False) -> Draw:
    """A draw; ``large``: each number of ranks as often. The simplest options come first."""
    model = choose((*["dense"] * 5, *MODELS))
    if choose((False, False, False, True)):
        layout = choose(own_layouts_of(model, large=large))
    else:
        layout = choose(layouts_of(model, choose(_LARGE_RANKS if large else _RANKS)))
    layout = replace(layout, comm=choose(comm_types(layout)))
    mode = choose(modes_of(layout))
    trains = choose((*COMMON, *COMMON, *TRAINS))
    fault = _fault(choose, layout, mode, trains=trains)
    rows, damage = _data(choose, fault, common=model == "dense" and trains in COMMON)
    restart = fault.kind in RESTARTED and choose((False, False, False, True))
    resume, resume_mode = (layout, mode) if restart else _resume(choose, model, layout)
    # Which step meets a damaged row is known of rows of one sample.
    packed = layout.cp > 1 and not damage and choose((False, True))
    return Draw(
        layout=layout,
        mode=mode,
        model=model,
        rows=rows,
        damage=damage,
        trains=trains,
        extras=_extras(choose, layout, mode),
        micro_batch=choose((2, 1)),
        fault=fault,
        resume=resume,
        resume_mode=resume_mode,
        restart=restart,
        packed=packed,
    )


def _extras(choose: Choose, layout: Layout, mode: str) -> tuple[str, ...]:
    found = [
        name
        for name, extra in EXTRAS.items()
        if can_have(name, layout, mode) and choose((False,) * (extra.odds - 1) + (True,))
    ]
    # Also where the run goes on in a layout that cannot have the one that brings them: optimizer
    # state is of one kind.
    found += [brought for name in found for brought in EXTRAS[name].brings]
    return tuple(dict.fromkeys(found))


def _resume(choose: Choose, model: str, layout: Layout) -> tuple[Layout, str]:
    """A layout and a mode to go on in: mostly the single rank, which costs least."""
    if not choose((False, False, False, True)):
        return ALONE, "uniform"
    two = layouts_of(model, 2)
    resume = choose((ALONE, *two) if layout.ranks == 1 else (layout, *two))
    return resume, choose(modes_of(resume))


def _data(choose: Choose, fault: Fault, *, common: bool) -> tuple[str, str]:
    """Rows, and what is wrong with one of them. What is not ``common`` meets fewer of both."""
    if fault.kind == "bad sample":
        damage = choose(DAMAGES)
    else:
        damage = choose(("", "", "", *DAMAGES)) if common else ""
    if damage in ("pixels", "media"):  # there is an image to damage
        return choose(("mixed", "many") if common else ("mixed",)), damage
    return choose(ROWS if common else ("mixed", "lone")), damage


def _fault(choose: Choose, layout: Layout, mode: str, *, trains: str) -> Fault:
    kinds = (
        *("none", *("exception",) * 5, "kill", "kill", "full disk", "full disk"),
        *("sigterm", "bad sample", "bad sample", "damaged checkpoint", "damaged checkpoint"),
        "output",
        *(("other start",) * 3 if layout.ranks > 1 else ()),
    )
    kind = choose(kinds)
    if kind in ("none", "bad sample"):
        return Fault(kind=kind)
    if kind in ("other start", "damaged checkpoint", "output"):
        return _before_training(choose, kind, layout, trains=trains)
    everyone = tuple(range(layout.ranks))
    all_ranks = kind in ("full disk", "sigterm") and choose((False, True))
    if kind == "full disk":
        ranks = everyone if all_ranks else (choose(everyone),)
        return Fault(
            kind=kind,
            ranks=ranks,
            way=choose(WAYS),
            step=choose((4, 2)),
            at=choose((1, 2, 3, 4, 5)),
        )
    place = choose([each for each in HAPPENINGS[kind] if comes_to(each, layout, mode)])
    step = choose((4, 2)) if place in ("save", "saved") else choose((3, 3, 4, 2, 1))
    return Fault(
        kind=kind,
        ranks=everyone if all_ranks else (choose(ranks_at(place, layout, mode)),),
        place=place,
        step=1 if place == "build" else step,
        at=1 if place in ("build", "save", "saved", "optimizer") else choose((1, 2, 3)),
    )


def _before_training(choose: Choose, kind: str, layout: Layout, *, trains: str) -> Fault:
    """What a start has to refuse; and an export that fails at its end."""
    place = choose(HAPPENINGS[kind])
    if kind == "damaged checkpoint":
        way = choose(CHECKPOINT_DAMAGES[place])
        return Fault(
            kind=kind,
            place=place,
            way=way,
            step=choose((STEPS, STEPS, STEPS - SAVE_INTERVAL)),
            at=choose((1, 2)),
        )
    if kind == "output":
        adapters = "adapters" in trains
        ways = [way for way in OUTPUTS[place] if adapters or way != "--save-lora"]
        everyone = tuple(range(layout.ranks))
        at_end = place == "export's end"
        return Fault(
            kind=kind,
            ranks=everyone if at_end else (),
            place=place,
            way=choose(ways),
            step=STEPS if at_end else 1,
        )
    # What is frozen goes with other settings, which only the plainest runs are sure to have.
    ways = [way for way in OTHER_STARTS[place] if trains == "everything" or "freeze" not in way]
    return Fault(kind=kind, ranks=(choose(range(layout.ranks)),), place=place, way=choose(ways))


def exchanges_features(mode: str) -> bool:
    """Whether features travel between ranks; else, only hidden states between stages do."""
    return is_full(mode) or mode in ("hetero-dp", "apart")


def comes_to(place: str, layout: Layout, mode: str) -> bool:
    """Whether a run of this layout comes to ``place``.

    Where encoders fill bubbles, a rank may have nothing to encode in a step.
    """
    if mode == "full-streamed" and place in ("unit", "encoder"):
        return False
    return place != "exchange" or layout.pp > 1 or exchanges_features(mode)


def ranks_at(place: str, layout: Layout, mode: str) -> tuple[int, ...]:
    """The ranks that come to ``place``."""
    if mode == "apart":
        return _apart_ranks_at(place, layout)
    on_first_stage = layout.ranks // layout.pp
    if place == "unit":
        # The first of each group that encodes together; those all have one on the first stage.
        apart = 1 if mode == "hetero-dp" else layout.tp * layout.cp
        everywhere = mode in ("full", "full-balanced")
        return tuple(range(layout.ranks) if everywhere else range(0, on_first_stage, apart))
    encodes = place == "encoder" or (place == "exchange" and mode == "hetero-dp")
    return tuple(range(on_first_stage if encodes and not is_full(mode) else layout.ranks))


def _apart_ranks_at(place: str, layout: Layout) -> tuple[int, ...]:
    """The same where encoders have ranks of their own."""
    everyone, decoder = range(layout.ranks), layout.decoder_ranks
    loads: list[int] = []  # the first of each group that encodes together, on the first stage
    sends: list[int] = []  # all of the last stage
    first = decoder
    for tp, pp, dp in layout.encoders:
        loads += range(first, first + tp * dp, tp)
        first += tp * pp * dp
        sends += range(first - tp * dp, first)
    ranks = {
        "unit": loads,
        "encoder": everyone[decoder:],
        "exchange": [*everyone[: decoder // layout.pp], *sends],
        "decoder": everyone[:decoder],
        "backward": everyone[:decoder],
    }
    return tuple(ranks.get(place, everyone))
