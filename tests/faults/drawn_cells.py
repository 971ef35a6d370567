"""Cells of the parity matrix that fuzzed runs are: small layouts, their modes and options."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from parity.cells import DENSE, EXPERTS, TWO, Cell
from parity.option_flags import APART, ENCODER_DP, FLAGS, FULL, SHARED, UNIFORM

Choose = Callable[[Sequence[Any]], Any]  # one of them

GLOBAL_BATCH = 8
MODELS = (DENSE, EXPERTS, "llava_tiny", "internvl_tiny", TWO)
MODES = (
    *(UNIFORM, "hetero-tp", ENCODER_DP, APART),
    *(f"{FULL}, {how}" for how in ("separated", "balanced", "wide", "auto")),
)
TRAINED = tuple(SHARED["trained"])
# What most runs train. The others meet fewer kinds of data: each pair takes a run without faults.
COMMON = ("all", "all but the encoder", "the decoder")
# What learns from images alone.
VISION = "all but the decoder"
# Flags that leave a run's losses as they are, where a cell has none for them.
EXTRAS = {
    "async save": ("--async-save",),
    "uniform sounds": ("model.audio_encoder.mode=uniform",),  # of two encoders, one in the mode
}


@cache
def layouts_of(model: str, ranks: int) -> tuple[Cell, ...]:
    """The model's uniform layouts on so many ranks; experts most often in parallel."""
    found = []
    for tp, cp, pp, vpp, ep in product((1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2), (1, 2, 4)):
        dp, rest = divmod(ranks, tp * cp * pp)
        sizes = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "ep": ep}
        split = model == EXPERTS and tp > 1
        cell = Cell(model=model, encoder_tp=tp, sequence_parallel=split, **sizes)
        if not rest and dp and cell.possible and pp * vpp <= 4 and GLOBAL_BATCH % (2 * dp) == 0:
            found += [cell] * (2 if ep > 1 else 1)
    return tuple(found)


@cache
def own_layouts_of(model: str, *, large: bool) -> tuple[Cell, ...]:
    """Layouts with encoders on ranks of their own, of two sometimes the first alone."""
    found: list[Cell] = []
    first = [sizes for sizes in product((1, 2), (1, 2), (1, 2, 3, 4)) if sizes.count(1) > 1]
    second = [(1, 1, 1), (1, 1, 2)] if model == TWO else []
    for own in (*((one,) for one in first), *product(first, second)):
        taken = sum(tp * pp * dp for tp, pp, dp in own)
        text = "|".join("/".join(map(str, sizes)) for sizes in own)
        for ranks in range(1, (6 if large else 4) - taken + 1):
            decoders = layouts_of(model, ranks)
            found += [replace(each, mode=APART, own=text) for each in decoders]
    return tuple(found)


def is_possible(cell: Cell) -> bool:
    """As the matrix has it, also where the second of two encoders lies with the decoder."""
    return replace(cell, mode=UNIFORM, own="").possible if cell.own else cell.possible


def in_modes(cell: Cell) -> list[Cell]:
    """A uniform layout in every mode that it can have; in the widest, stages encode together."""
    if cell.own:
        return [cell]
    full = replace(cell, mode=FULL, encoder_tp=1)
    found = [
        *(cell, replace(cell, encoder_tp=1), replace(cell, mode=ENCODER_DP, encoder_tp=1)),
        *(full, replace(full, balance=True)),
    ]
    if cell.pp > 1:
        wide = replace(full, encoder_tp=cell.tp * cell.cp * cell.pp)
        found += [wide, replace(full, schedule="auto")]
    return [each for each in dict.fromkeys(found) if each.possible]


def mode_of(cell: Cell) -> str:
    """What tells modes apart where the fuzz is counted."""
    if cell.mode != FULL:
        return "hetero-tp" if cell.heterogeneous and cell.mode == UNIFORM else cell.mode
    wide = "wide" if cell.encoder_tp > cell.tp * cell.cp else cell.schedule
    return f"{FULL}, {'balanced' if cell.balance else wide}"


def with_options(choose: Choose, cell: Cell, *, packs: bool) -> Cell:
    """Options that change no loss: mostly few. ``packs``: rows may be some."""
    rare = (False,) * 3 + (True,)
    optimizers = [each for each in FLAGS["optimizer"] if cell.ranks > 1 or each != "overlapped"]
    chosen = {
        "optimizer": choose(optimizers),
        "micro_batch": choose((2, 1)),
        "recompute": choose(tuple(FLAGS["recompute"])) if choose(rare) else "none",
        "sequence_parallel": cell.sequence_parallel or (cell.tp > 1 and choose(rare)),
        "away": choose(tuple(FLAGS["away"])) if cell.mode == FULL and choose((0, 1)) else "nothing",
    }
    if cell.cp > 1:
        ways = [each for each in ("all_gather", "a2a", "p2p") if _comes_by(cell, each)]
        chosen["comm"] = choose(ways)
        if packs and choose((False, True)):
            rows = "packs, zigzag" if chosen["comm"] == "p2p" else "packs, lpt"
            chosen |= {"rows": rows, "micro_batch": 1}
    return replace(cell, **chosen)


def _comes_by(cell: Cell, comm: str) -> bool:
    return is_possible(replace(cell, comm=comm))


def goes_on_as(cell: Cell, layout: Cell) -> Cell:
    """The same training in another layout: what it trains on, and the kind of optimizer state."""
    optimizer = "distributed" if cell.optimizer != "plain" else "plain"
    return replace(
        layout,
        optimizer=optimizer,
        trained=cell.trained,
        micro_batch=cell.micro_batch,
        rows="padded" if cell.rows == "padded" else "packs, zigzag",
    )


def extra_flags(extras: Sequence[str], cell: Cell) -> list[str]:
    """Flags of those ``extras`` that the cell can have."""
    can = {"uniform sounds": cell.model == TWO and cell.ranks > 1 and not cell.own}
    return [flag for name in extras if can.get(name, True) for flag in EXTRAS[name]]
