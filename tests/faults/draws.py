"""What a fuzzed run is: a choice of options, and what goes wrong in it. Pure.

``drawn`` makes a draw out of choices. Whoever calls it brings the choices: hypothesis in the
tests, a seeded generator in ``fuzz_runs.py``. A draw is written and read as one line of JSON.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Self

from drawn_cells import (
    COMMON,
    EXTRAS,
    MODELS,
    TRAINED,
    VISION,
    Choose,
    goes_on_as,
    in_modes,
    is_possible,
    layouts_of,
    own_layouts_of,
    with_options,
)
from parity.cells import DENSE, Cell
from parity.option_flags import ENCODER_DP, FULL

STEPS = 4
SAVE_INTERVAL = 2
DAMAGED_STEP = 3
ALONE = Cell(model=DENSE)
ROWS = ("text", "mixed", "many", "lone")  # how many images rows have
DAMAGES = ("pixels", "media", "row")  # of one row, which the third step meets

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
_FROZEN = ("its model", VISION)
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
    """One fuzzed run of a cell. ``resume`` is the cell as which it goes on afterwards.

    ``restart``: the same command line goes on, as torchrun has it, from a checkpoint or without
    one.
    """

    cell: Cell = ALONE
    rows: str = "mixed"
    damage: str = ""  # "" for none; met with --bad-sample skip, unless that is the fault
    extras: tuple[str, ...] = ()
    fault: Fault = Fault()
    resume: Cell = ALONE
    restart: bool = False

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
        fault = data["fault"] | {"ranks": tuple(data["fault"]["ranks"])}
        cells = {name: Cell(**data[name]) for name in ("cell", "resume")}
        return cls(**{**data, **cells, "fault": Fault(**fault), "extras": tuple(data["extras"])})


_RANKS = (*(1,) * 4, *(2,) * 6, 3, 4, 4)
_LARGE_RANKS = (1, 2, 3, 4)


def drawn(choose: Choose, *, large: bool = False) -> Draw:
    """A draw; ``large``: each number of ranks as often. The simplest options come first."""
    model = choose((*[DENSE] * 5, *MODELS))
    if choose((False, False, False, True)):
        layout = choose(own_layouts_of(model, large=large))
    else:
        layout = choose(layouts_of(model, choose(_LARGE_RANKS if large else _RANKS)))
    cell = choose(in_modes(layout))
    trained = [each for each in TRAINED if is_possible(replace(cell, trained=each))]
    cell = replace(cell, trained=choose([each for each in COMMON if each in trained] * 2 + trained))
    fault = _fault(choose, cell)
    rows, damage = _data(choose, fault, common=model == DENSE and cell.trained in COMMON)
    # Which step meets a damaged row is known of rows of one sample.
    cell = with_options(choose, cell, packs=not damage)
    restart = fault.kind in RESTARTED and choose((False, False, False, True))
    return Draw(
        cell=cell,
        rows=rows,
        damage=damage,
        extras=tuple(name for name in EXTRAS if choose((False, False, False, True))),
        fault=fault,
        resume=cell if restart else _resume(choose, cell, layout),
        restart=restart,
    )


def _resume(choose: Choose, cell: Cell, layout: Cell) -> Cell:
    """What a run goes on as: mostly the single rank, which costs least."""
    (alone,), two = layouts_of(cell.model, 1), layouts_of(cell.model, 2)
    if not choose((False, False, False, True)):
        return goes_on_as(cell, alone)
    if layout.ranks > 1 and choose((True, False)):
        return cell
    return goes_on_as(cell, choose(in_modes(choose((alone, *two)))))


def _data(choose: Choose, fault: Fault, *, common: bool) -> tuple[str, str]:
    """Rows, and what is wrong with one of them. What is not ``common`` meets fewer of both."""
    if fault.kind == "bad sample":
        damage = choose(DAMAGES)
    else:
        damage = choose(("", "", "", *DAMAGES)) if common else ""
    if damage in ("pixels", "media"):  # there is an image to damage
        return choose(("mixed", "many") if common else ("mixed",)), damage
    return choose(ROWS if common else ("mixed", "lone")), damage


def _fault(choose: Choose, cell: Cell) -> Fault:
    kinds = (
        *("none", *("exception",) * 5, "kill", "kill", "full disk", "full disk"),
        *("sigterm", "bad sample", "bad sample", "damaged checkpoint", "damaged checkpoint"),
        "output",
        *(("other start",) * 3 if cell.ranks > 1 else ()),
    )
    kind = choose(kinds)
    if kind in ("none", "bad sample"):
        return Fault(kind=kind)
    if kind in ("other start", "damaged checkpoint", "output"):
        return _before_training(choose, kind, cell)
    everyone = tuple(range(cell.ranks))
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
    place = choose([each for each in HAPPENINGS[kind] if comes_to(each, cell)])
    step = choose((4, 2)) if place in ("save", "saved") else choose((3, 3, 4, 2, 1))
    return Fault(
        kind=kind,
        ranks=everyone if all_ranks else (choose(ranks_at(place, cell)),),
        place=place,
        step=1 if place == "build" else step,
        at=1 if place in ("build", "save", "saved", "optimizer") else choose((1, 2, 3)),
    )


def _before_training(choose: Choose, kind: str, cell: Cell) -> Fault:
    """What a start has to refuse; and an export that fails at its end."""
    # A rate of its own is refused of a decoder that is frozen, before ranks are held side by side.
    place = choose([each for each in HAPPENINGS[kind] if (each, cell.trained) != _FROZEN])
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
        adapters = "LoRA" in cell.trained
        ways = [way for way in OUTPUTS[place] if adapters or way != "--save-lora"]
        everyone = tuple(range(cell.ranks))
        at_end = place == "export's end"
        return Fault(
            kind=kind,
            ranks=everyone if at_end else (),
            place=place,
            way=choose(ways),
            step=STEPS if at_end else 1,
        )
    # What is frozen goes with other settings, which only the plainest runs are sure to have.
    ways = [way for way in OTHER_STARTS[place] if cell.trained == "all" or "freeze" not in way]
    return Fault(kind=kind, ranks=(choose(range(cell.ranks)),), place=place, way=choose(ways))


def exchanges_features(cell: Cell) -> bool:
    """Whether features travel between ranks; else, only hidden states between stages do."""
    return bool(cell.own) or cell.mode in (FULL, ENCODER_DP)


def comes_to(place: str, cell: Cell) -> bool:
    """Whether a run of this cell comes to ``place``.

    Where encoders fill bubbles, a rank may have nothing to encode in a step.
    """
    if cell.schedule == "auto" and place in ("unit", "encoder"):
        return False
    return place != "exchange" or cell.pp > 1 or exchanges_features(cell)


def ranks_at(place: str, cell: Cell) -> tuple[int, ...]:
    """The ranks that come to ``place``."""
    if cell.own:
        return _apart_ranks_at(place, cell)
    on_first_stage = cell.ranks // cell.pp
    full, dp = cell.mode == FULL, cell.mode == ENCODER_DP
    if place == "unit":
        # The first of each group that encodes together; those all have one on the first stage.
        apart = 1 if dp else cell.tp * cell.cp
        everywhere = full and cell.encoder_tp == 1
        return tuple(range(cell.ranks) if everywhere else range(0, on_first_stage, apart))
    encodes = place == "encoder" or (place == "exchange" and dp)
    return tuple(range(on_first_stage if encodes and not full else cell.ranks))


def _apart_ranks_at(place: str, cell: Cell) -> tuple[int, ...]:
    """The same where encoders have ranks of their own."""
    everyone, decoder = range(cell.ranks), cell.decoder_ranks
    loads: list[int] = []  # the first of each group that encodes together, on the first stage
    sends: list[int] = []  # all of the last stage
    first = decoder
    for tp, pp, dp in cell.own_sizes:
        loads += range(first, first + tp * dp, tp)
        first += tp * pp * dp
        sends += range(first - tp * dp, first)
    ranks = {
        "unit": loads,
        "encoder": everyone[decoder:],
        "exchange": [*everyone[: decoder // cell.pp], *sends],
        "decoder": everyone[:decoder],
        "backward": everyone[:decoder],
    }
    return tuple(ranks.get(place, everyone))
