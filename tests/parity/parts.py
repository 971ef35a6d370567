"""The parts of the parity matrix: which cells there are, by one dict of axes.

A part has every layout of its axes that is possible, or few cells in which every two values of two
axes meet. Pure and the same every time.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

from parity.cells import CPS, EXPERTS, HEARING_MODELS, MODELS, MODES, MORE_MODELS, TWO, Cell
from parity.option_flags import APART, ENCODER_DP, FLAGS, FULL, SHARED, UNIFORM
from parity.pairwise import covering, few_of, one_of_each
from parity.placed import OVERLAPPED_CONTEXT, STREAMED_CONTEXT, placement_cells

_SIZES, _SMALL = (1, 2, 4), (1, 2)
_EITHER = (False, True)
_RARE = ("plain", "overlapped")  # optimizers, where what lies between is in the layouts' cells
_SAVINGS = [
    (trained, away)
    for trained in SHARED["trained"]
    for away in FLAGS["away"]
    if (trained, away) != ("all", "nothing")
]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Cells that the matrix runs together, and that have a page of their own.

    A key of ``axes`` names one field of a cell or several, whose values then stand together. The
    layout's fields come first, with sequence parallelism as the last. ``choose`` takes few of all
    cells of each of ``models``; of ``few_models`` every value is in every mode. ``by_hand`` are
    cells more.
    """

    about: str
    axes: Mapping[str, Sequence[object]] = field(default_factory=dict)
    models: tuple[str, ...] = MODELS
    choose: Callable[..., list[Cell]] = covering
    few_models: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)  # what all cells have
    only: Callable[[Cell], bool] = lambda cell: True
    both_ways: bool = False  # few cells have an encoder TP below TP, and one above
    by_hand: tuple[Cell, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of all axes, the mode's first."""
        names = [name for names in self.axes for name in names.split()]
        return tuple(sorted(names, key=lambda name: name != "mode"))

    def every(self, model: str) -> list[Cell]:
        """All cells of the model that are possible, in the order of the axes' values."""
        cells, layout = [Cell(model=model, **self.given)], True
        for names, values in self.axes.items():
            cells = [replace(cell, **_fields(names, each)) for cell in cells for each in values]
            layout &= names != "sequence_parallel"
            if not layout:
                cells = [cell for cell in cells if cell.possible and self.only(cell)]
        return cells

    def cells(self) -> list[Cell]:
        """The part's cells."""
        return [
            *(cell for model in self.models for cell in self._chosen(model)),
            *(cell for model in self.few_models for cell in self._few(model)),
            *self.by_hand,
        ]

    def _chosen(self, model: str) -> list[Cell]:
        everything: Sequence[object] = self.every(model)
        if self.choose is one_of_each:
            everything = [list(cells) for _, cells in groupby(self.every(model), layout_of)]
        return self.choose(everything, self.fields, seed=model)

    def _few(self, model: str) -> list[Cell]:
        everything = self.every(model)
        random.Random(model).shuffle(everything)  # the layouts that are first have one rank
        cells = few_of(everything, self.fields)
        for wanted in (_below, _above) if self.both_ways else ():
            if not any(map(wanted, cells)):
                cells.append(next(filter(wanted, everything)))
        return sorted(cells)


def _fields(names: str, value: Any) -> dict[str, Any]:
    split = names.split()
    return dict(zip(split, value if len(split) > 1 else [value], strict=True))


def layout_of(cell: Cell) -> tuple[object, ...]:
    """A cell without its options."""
    sizes = (cell.encoder_tp, cell.tp, cell.pp, cell.vpp, cell.dp, cell.ep, cell.cp)
    return (cell.mode, cell.own, *sizes)


def _below(cell: Cell) -> bool:
    return cell.mode == UNIFORM and cell.encoder_tp < cell.tp


def _above(cell: Cell) -> bool:
    return cell.mode == FULL and cell.encoder_tp > cell.tp


def _sizes(*names: str, values: Sequence[int]) -> dict[str, Sequence[int]]:
    return dict.fromkeys(names, values)


_LAYOUTS: dict[str, Sequence[object]] = {
    "mode": MODES,
    **_sizes("tp", "pp", "vpp", "dp", "ep", "encoder_tp", values=_SIZES),
    "sequence_parallel": _EITHER,
    "recompute": tuple(FLAGS["recompute"]),
    "tied": _EITHER,
    "optimizer": tuple(FLAGS["optimizer"]),
    "balance": _EITHER,
}
PARTS: Mapping[str, Part] = {
    "layouts": Part(
        about="Every layout over 1, 2 and 4 that fits 8 ranks, in every mode that is another one "
        "there, with one choice of the options. An encoder TP above TP is of several stages.",
        axes=_LAYOUTS,
        choose=one_of_each,
        few_models=MORE_MODELS,
        both_ways=True,
    ),
    "hearing": Part(
        about="Models that hear. The second one has an encoder of images as well, in the same "
        "mode, and its samples have images too.",
        axes=_LAYOUTS,
        models=(),
        few_models=HEARING_MODELS,
        both_ways=True,
    ),
    "savings": Part(
        about="The single rank trains the same parameters; a frozen one may not move. Adapters "
        "start at random values. *Away* is what leaves the device while the decoder works.",
        axes={
            "mode": MODES,
            **_sizes("tp", "pp", "vpp", "dp", "ep", values=_SMALL),
            "encoder_tp": _SIZES,  # four are two stages of TP 2
            "sequence_parallel": _EITHER,
            "recompute": ("none", "both"),
            "tied": _EITHER,
            "optimizer": _RARE,
            "balance": _EITHER,
            "trained away": _SAVINGS,
        },
        only=lambda cell: cell.ranks > 1,
    ),
    "overlap": Part(
        about="The experts' exchange beside computation, on as few ranks as it takes. Each cell is "
        "also held, bit by bit, in bf16 over three steps, against the same layout with neither "
        "the overlap nor what goes with it; some microbatches are text.",
        axes={
            "mode encoder_tp tp": (
                *((UNIFORM, 1, 1), (UNIFORM, 2, 2), (UNIFORM, 1, 2), (ENCODER_DP, 1, 2)),
                *((FULL, 1, 1), (FULL, 1, 2), (FULL, 2, 2)),
            ),
            "pp vpp": ((1, 1), (2, 2)),  # Megatron's schedule takes no stages without virtual ones
            "ep": (2, 4),
            "dp": _SIZES,
            "sequence_parallel": _EITHER,
            "recompute": ("none", "encoder"),
            "tied": (False,),
            "optimizer": tuple(FLAGS["optimizer"]),
            "balance": _EITHER,
            "trained": ("all", "all but the encoder", "decoder's LoRA"),
            "kept": tuple(FLAGS["kept"]),
            "delayed": _EITHER,
            "shared_experts": _EITHER,
        },
        models=(EXPERTS,),
        choose=one_of_each,
        given={"overlap": True},
        only=lambda cell: cell.tp * cell.dp == cell.ep,
    ),
    "context": Part(
        about="Each row's tokens lie on CP ranks. Encoders work in every mode, or apart, on ranks "
        "of their own. Few cells stream; few overlap the experts' exchange, with the same second "
        "comparison as in the part of the overlap.",
        axes={
            "cp": CPS,
            "mode own": (
                *((mode, "") for mode in MODES),
                *((APART, own) for own in ("1/1/1", "1/1/2", "1/1/1|1/1/1", "2/1/1|1/1/2")),
            ),
            **_sizes("encoder_tp", "tp", "pp", "vpp", "dp", "ep", values=_SMALL),
            "sequence_parallel": _EITHER,
            "recompute": ("none", "both"),
            "tied": (False,),
            "optimizer": _RARE,
            "trained": ("all", "all but the encoder", "decoder's LoRA"),
            "rows": tuple(FLAGS["rows"]),
            "comm": ("all_gather", "a2a", "p2p"),
            "balance": _EITHER,
            "away": ("nothing", "all three"),
        },
        few_models=(TWO,),
        by_hand=(*STREAMED_CONTEXT, *OVERLAPPED_CONTEXT),
    ),
    "streamed": Part(
        about="Every layout of full separation that has pipeline stages, each with whole replicas "
        "of the encoder. Where the clock says that a step would not be faster so, it is separated "
        "in these runs, too. A pass costs nothing but its rows there, so that there are many. Of "
        "two encoders the first streams.",
        axes={
            "mode": (FULL,),
            "tp": _SIZES,
            "pp": (2, 4),
            **_sizes("vpp", "dp", "ep", "encoder_tp", values=_SIZES),
            "sequence_parallel": _EITHER,
            "schedule": ("streamed",),
            "recompute": ("none", "both"),
            "tied": (False,),
            "optimizer": _RARE,
            "balance": (False,),
            "trained": ("all", "all but the encoder", "the decoder", "LoRA of all modules"),
            "away": ("nothing", "activations"),
        },
        choose=one_of_each,
        given={"schedule": "streamed"},
        few_models=(*MORE_MODELS, *HEARING_MODELS),
    ),
    "placements": Part(
        about="All encoders lie apart from the decoder. Sizes are TP/PP/DP; the encoders' ranks "
        "begin behind the decoder's. *Media* are what the samples keep; `text first`: those of "
        "the first step have none.",
        models=(),
        by_hand=tuple(placement_cells()),
    ),
}


@cache
def cells_of(part: str) -> tuple[Cell, ...]:
    """The cells of a part, by its name."""
    return tuple(PARTS[part].cells())


def sample(cells: Sequence[Cell], number: int, *, seed: int) -> list[Cell]:
    """``number`` of the cells, the same for the same seed.

    In turn of each model, and of a model's in turn of each mode; the models begin with other modes,
    so that three cells have three models and all modes.
    """
    generator = random.Random(seed)
    by_model = [
        _modes_in_turn([cell for cell in cells if cell.model == model], generator, first=first)
        for first, model in enumerate((*MODELS, *MORE_MODELS, *HEARING_MODELS))
    ]
    return sorted(_in_turn(by_model, number))


def _modes_in_turn(
    cells: Sequence[Cell], generator: random.Random, *, first: int
) -> Iterator[Cell]:
    modes = [mode for mode in (*MODES, APART) if any(cell.mode == mode for cell in cells)]
    by_mode = [[cell for cell in cells if cell.mode == mode] for mode in modes]
    shuffled = [iter(generator.sample(mine, len(mine))) for mine in by_mode]
    first %= len(modes) or 1
    return iter(_in_turn([*shuffled[first:], *shuffled[:first]], len(cells)))


def _in_turn(streams: Sequence[Iterator[Cell]], number: int) -> list[Cell]:
    taken: list[Cell] = []
    while len(taken) < number:
        before = len(taken)
        for stream in streams:
            taken += [cell for cell in [next(stream, None)] if cell is not None]
        if len(taken) == before:
            break
    return taken[:number]
