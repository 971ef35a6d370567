"""The cells of the parity matrix: which layouts are run, each with which options.

Pure and the same every time. Every layout of the axes that fits the ranks is run, with one choice
of the options; over all cells of a model, every two values of two axes meet somewhere.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product

SIZES = (1, 2, 4)
MOST_RANKS = 8
MODELS = ("qwen3_vl_tiny", "qwen3_vl_moe_tiny", "qwen2_5_vl_tiny")
OPTIMIZERS = ("plain", "distributed", "overlapped")
RECOMPUTES = ("none", "encoder", "decoder", "both")


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One run of the matrix."""

    model: str
    encoder_tp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    tied: bool = False
    optimizer: str = "plain"

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.tp * self.pp * self.dp

    @property
    def layers(self) -> int:
        """Decoder layers that fill the pipeline; four where it is short."""
        return max(4, self.pp * self.vpp)

    @property
    def heterogeneous(self) -> bool:
        """Whether the encoder has a tensor parallel size of its own."""
        return self.encoder_tp != self.tp

    @property
    def reference(self) -> str:
        """Names the single rank's run that it is held against, and the weights of both."""
        return f"{self.model}-{self.layers}{'-tied' if self.tied else ''}"

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        sizes = f"e{self.encoder_tp}t{self.tp}p{self.pp}v{self.vpp}d{self.dp}x{self.ep}"
        marks = [self.model, sizes, self.optimizer, f"recompute-{self.recompute}"]
        marks += ["sp"] if self.sequence_parallel else []
        return "-".join([*marks, *(["tied"] if self.tied else [])])

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        given = [
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.pp)),
        ]
        if self.vpp > 1:
            given += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.ep > 1:
            given += ["--expert-model-parallel-size", str(self.ep)]
            given += ["--expert-tensor-parallel-size", "1"]
        if self.sequence_parallel:
            given += ["--sequence-parallel"]
        if self.recompute in ("decoder", "both"):
            given += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
            given += ["--recompute-num-layers", "1"]
        if self.recompute in ("encoder", "both"):
            given += ["model.image_encoder.recompute=true"]
        if self.heterogeneous:
            given += [f"model.image_encoder.tensor_model_parallel_size={self.encoder_tp}"]
        if self.optimizer != "plain":
            given += ["--use-distributed-optimizer"]
        if self.optimizer == "overlapped":
            given += ["--overlap-grad-reduce", "--overlap-param-gather"]
        return given


AXES = tuple(field.name for field in fields(Cell))


def layouts(model: str) -> list[Cell]:
    """Every layout of the model that fits the ranks, without options."""
    return [
        Cell(model=model, encoder_tp=encoder_tp, tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep)
        for tp, pp, vpp, dp, ep, encoder_tp in product(SIZES, repeat=6)
        if tp * pp * dp <= MOST_RANKS
        and tp % encoder_tp == 0
        and (pp > 1 or vpp == 1)
        and tp * dp % ep == 0
        and ("moe" in model or ep == 1)
    ]


def choices(layout: Cell) -> list[Cell]:
    """The layout with every choice of the options that it can have."""
    parallel: tuple[bool, ...] = (False, True) if layout.tp > 1 else (False,)
    if "moe" in layout.model and layout.tp > 1:
        parallel = (True,)  # experts under tensor parallelism ask for it
    sizes = {name: getattr(layout, name) for name in AXES[:7]}
    return [
        Cell(
            **sizes, sequence_parallel=sequence, recompute=recompute, tied=tied, optimizer=optimizer
        )
        for sequence, recompute, tied, optimizer in product(
            parallel, RECOMPUTES, (False, True), OPTIMIZERS
        )
    ]


def matrix(model: str) -> list[Cell]:
    """The model's cells: each layout, and more until every two axis values have met."""
    everything = [choices(layout) for layout in layouts(model)]
    wanted = {pair for possible in everything for cell in possible for pair in pairs(cell)}
    generator = random.Random(model)
    cells: list[Cell] = []
    for possible in everything:
        generator.shuffle(possible)  # so that where nothing is wanted any more, options vary
        cells.append(max(possible, key=lambda cell: len(pairs(cell) & wanted)))
        wanted -= pairs(cells[-1])
    while wanted:
        possible = [cell for each in everything for cell in each]
        cells.append(max(possible, key=lambda cell: len(pairs(cell) & wanted)))
        wanted -= pairs(cells[-1])
    return sorted(cells)


def pairs(cell: Cell) -> set[tuple[int, object, int, object]]:
    """Every two values of two axes that meet in the cell."""
    values = astuple(cell)
    return {
        (first, values[first], second, values[second])
        for first, second in combinations(range(1, len(values)), 2)
    }


def all_cells() -> list[Cell]:
    """The whole matrix."""
    return [cell for model in MODELS for cell in matrix(model)]


def sample(cells: Sequence[Cell], number: int, *, seed: int) -> list[Cell]:
    """``number`` of the cells, in turn of each model, the same for the same seed."""
    generator = random.Random(seed)
    by_model = [
        iter(generator.sample(mine, len(mine)))
        for model in MODELS
        if (mine := [cell for cell in cells if cell.model == model])
    ]
    return sorted(_in_turn(by_model, number))


def _in_turn(streams: Sequence[Iterator[Cell]], number: int) -> list[Cell]:
    taken: list[Cell] = []
    while len(taken) < number:
        before = len(taken)
        for stream in streams:
            taken += [cell for cell in [next(stream, None)] if cell is not None]
        if len(taken) == before:
            break
    return taken[:number]
