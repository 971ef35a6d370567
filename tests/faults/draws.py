"""What a fuzzed run is: layout, mode, data, freeze, and what goes wrong in it. Pure.

``drawn`` makes a draw out of choices. Whoever calls it brings the choices: hypothesis in the
tests, a seeded generator in ``fuzz_runs.py``. A draw is written and read as one line of JSON.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

Choose = Callable[[Sequence[Any]], Any]  # one of them

STEPS = 4
SAVE_INTERVAL = 2
GLOBAL_BATCH = 8
ROWS = ("text", "mixed", "many", "lone")  # how many images rows have
DAMAGES = ("pixels", "media", "row")  # of one row, which the third step meets
DAMAGED_STEP = 3

PLACES = (
    *("build", "data", "unit", "encoder", "decoder", "exchange", "backward", "optimizer"),
    *("save", "saved"),
)
WAYS = ("open", "write", "flush")  # where a full disk shows


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of the decoder; data parallel is what is left of ``ranks``."""

    ranks: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1

    def flags(self) -> list[str]:
        """As the command line has them."""
        flags = []
        if self.tp > 1:
            flags += ["--tensor-model-parallel-size", str(self.tp)]
        if self.pp > 1:
            flags += ["--pipeline-model-parallel-size", str(self.pp)]
        if self.vpp > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        return flags


ALONE = Layout()
# By the number of ranks. Most draws have one or two: a draw costs what its ranks cost.
LAYOUTS = {
    1: (ALONE,),
    2: (
        Layout(ranks=2),
        Layout(ranks=2, tp=2),
        Layout(ranks=2, pp=2),
        Layout(ranks=2, pp=2, vpp=2),
    ),
    4: (
        Layout(ranks=4, tp=2),
        Layout(ranks=4, pp=2),
        Layout(ranks=4, tp=2, pp=2),
        Layout(ranks=4, tp=2, pp=2, vpp=2),
        Layout(ranks=4, tp=4),
        Layout(ranks=4, pp=4),
    ),
}

# Flags of each mode; ``MODES_OF`` says which a layout can have.
MODES: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "hetero-tp": ("model.image_encoder.tensor_model_parallel_size=1",),
    "hetero-dp": ("--enable-encoder-hetero-dp",),
    "full": ("--enable-full-hetero-dp",),
    "full-balanced": (
        *("--enable-full-hetero-dp", "--use-vit-dp-balance"),
        *("--dp-balance-trigger-threshold-vit", "0"),
    ),
}
FREEZES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "encoder": ("+model.image_encoder.freeze=True",),
    "encoder and projector": (
        *("+model.image_encoder.freeze=True", "+model.image_projector.freeze=True"),
    ),
}
# What may be added to a run and leaves its losses as they are; each is there in some draws.
EXTRAS: dict[str, tuple[str, ...]] = {
    "distributed optimizer": ("--use-distributed-optimizer",),
    "overlap": ("--overlap-grad-reduce",),
    "async save": ("--async-save",),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, where and when.

    ``kind``: none, exception, kill, full disk, sigterm, bad sample. ``ranks``: those that it
    happens to. It happens at the ``at``-th time, counted from the beginning of ``step`` (for
    the disk, from the save after it), that a rank comes to ``place`` (or meets the disk in
    ``way``).
    """

    kind: str = "none"
    ranks: tuple[int, ...] = ()
    place: str = ""
    way: str = ""
    step: int = 1
    at: int = 1


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One fuzzed run. ``resume`` is the layout in which it goes on afterwards."""

    layout: Layout
    mode: str
    rows: str
    damage: str  # "" for none; met with --bad-sample skip, unless that is the fault
    freeze: str
    extras: tuple[str, ...]
    micro_batch: int
    fault: Fault
    resume: Layout
    resume_mode: str

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


def drawn(choose: Choose, *, large: bool = False) -> Draw:
    """A draw; ``large``: four ranks as often as one or two. The simplest options come first."""
    layout = choose(LAYOUTS[choose((1, 2, 4) if large else (1, 1, 2, 2, 2, 4))])
    mode = choose(modes_of(layout))
    fault = _fault(choose, layout, mode)
    damage = choose(DAMAGES) if fault.kind == "bad sample" else choose(("", "", "", *DAMAGES))
    rows = choose(ROWS if damage in ("", "row") else ("mixed", "many"))
    extras = tuple(name for name in EXTRAS if _has(choose, name, layout))
    resume, resume_mode = ALONE, "uniform"
    if choose((False, False, True)):
        resume = choose(LAYOUTS[choose((1, 2))] if layout.ranks == 1 else (layout, *LAYOUTS[2]))
        resume_mode = choose(modes_of(resume))
    return Draw(
        layout=layout,
        mode=mode,
        rows=rows,
        damage=damage,
        freeze=choose(tuple(FREEZES)),
        extras=extras,
        micro_batch=choose((2, 1)),
        fault=fault,
        resume=resume,
        resume_mode=resume_mode,
    )


def modes_of(layout: Layout) -> tuple[str, ...]:
    """Those that a layout can have."""
    if layout.tp > 1:
        return tuple(MODES)
    return ("uniform", "full", "full-balanced")


def _has(choose: Choose, extra: str, layout: Layout) -> bool:
    if extra == "overlap" and layout.ranks == 1:
        return False
    return bool(
        choose((False, False, False, False, True) if extra == "async save" else (True, False))
    )


def _fault(choose: Choose, layout: Layout, mode: str) -> Fault:
    kind = choose(
        (
            *("none", "exception", "exception", "exception", "kill", "kill"),
            *("full disk", "full disk", "sigterm", "bad sample"),
        )
    )
    if kind in ("none", "bad sample"):
        return Fault(kind=kind)
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
    # A signal before training is set up ends a process in the ordinary way: that is a kill.
    place = choose(places_of(layout, mode)[1:] if kind == "sigterm" else places_of(layout, mode))
    step = choose((4, 2)) if place in ("save", "saved") else choose((3, 3, 4, 2, 1))
    return Fault(
        kind=kind,
        ranks=everyone if all_ranks else (choose(ranks_at(place, layout, mode)),),
        place=place,
        step=1 if place == "build" else step,
        at=1 if place in ("build", "save", "saved", "optimizer") else choose((1, 2, 3)),
    )


def places_of(layout: Layout, mode: str) -> tuple[str, ...]:
    """Where a run of this layout comes to."""
    exchanges = mode in ("hetero-dp", "full", "full-balanced") or layout.pp > 1
    return tuple(place for place in PLACES if place != "exchange" or exchanges)


def ranks_at(place: str, layout: Layout, mode: str) -> tuple[int, ...]:
    """The ranks that come to ``place``."""
    on_first_stage = layout.ranks // layout.pp
    if mode not in ("full", "full-balanced"):
        if place == "encoder" or (place == "exchange" and mode == "hetero-dp"):
            return tuple(range(on_first_stage))
        if place == "unit":
            apart = 1 if mode == "hetero-dp" else layout.tp
            return tuple(range(0, on_first_stage, apart))
    return tuple(range(layout.ranks))
