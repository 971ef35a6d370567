"""The cells of the parity matrix: which layouts are run, each with which options.

Pure and the same every time. Every layout of the axes that fits the ranks is run in every mode in
which it is possible, with one choice of the options; over all cells of a model, every two values of
two axes meet somewhere. Of further models, few cells have every value of every axis in each mode.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product

SIZES = (1, 2, 4)
MOST_RANKS = 8
BATCH = 8  # microbatches of a step, over all replicas of the decoder
MODELS = ("qwen3_vl_tiny", "qwen3_vl_moe_tiny", "qwen2_5_vl_tiny")
MORE_MODELS = ("llava_tiny", "siglip2_qwen3_tiny", "internvl_tiny")  # in few cells each
HEARING_MODELS = ("qwen2_audio_tiny", "qwen2_5_omni_tiny")  # in few cells, with a page of their own
UNIFORM, ENCODER_DP, FULL = "uniform", "encoder-hetero-dp", "full-hetero-dp"
MODES = (UNIFORM, ENCODER_DP, FULL)
OPTIMIZERS = ("plain", "distributed", "overlapped")
RECOMPUTES = ("none", "encoder", "decoder", "both")


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One run of the matrix."""

    model: str
    mode: str = UNIFORM
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
    balance: bool = False

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.tp * self.pp * self.dp

    @property
    def layers(self) -> int:
        """Decoder layers that fill the pipeline; at least four."""
        chunks = self.pp * self.vpp
        return chunks * -(-4 // chunks)

    @property
    def divides(self) -> int:
        """What the tokens of a row have to be a multiple of."""
        return max(SIZES)

    @property
    def encoders(self) -> tuple[str, ...]:
        """Keys of the model's encoders, which all have the cell's mode and size."""
        if "omni" in self.model:
            return "image_encoder", "audio_encoder"
        return ("audio_encoder",) if "audio" in self.model else ("image_encoder",)

    @property
    def heterogeneous(self) -> bool:
        """Whether the encoder has a tensor parallel size of its own."""
        return self.encoder_tp != self.tp

    @property
    def possible(self) -> bool:
        """Whether it fits the ranks, and the mode is another one than uniform there."""
        return (
            self.ranks <= MOST_RANKS
            and (self.tp % self.encoder_tp == 0 or self._on_several_stages)
            and (self.pp > 1 or self.vpp == 1)
            and self.tp * self.dp % self.ep == 0
            and ("moe" in self.model or self.ep == 1)
            and (self.mode != ENCODER_DP or self.heterogeneous)
        )

    @property
    def _on_several_stages(self) -> bool:
        """Whether a replica of the encoder makes up several stages, in the plainest pipeline."""
        stages, rest = divmod(self.encoder_tp, self.tp)
        return (
            self.mode == FULL
            and rest == 0
            and self.pp % stages == 0
            and (self.vpp, self.ep) == (1, 1)
        )

    @property
    def can_balance(self) -> bool:
        """Whether some encoder replica has two units to a step, so that it matters which."""
        return self.mode == FULL and self.microbatches > self.encoder_replicas > 1

    @property
    def streams(self) -> bool:
        """Whether its encoders work in the pipeline's bubbles."""
        return False

    @property
    def order(self) -> tuple[str, "Cell"]:
        """To sort by: cells of one kind behind each other, since only these can be compared."""
        return type(self).__name__, self

    @property
    def microbatches(self) -> int:
        """Of a step, in one replica of the decoder."""
        return BATCH // self.dp

    @property
    def encoder_replicas(self) -> int:
        """That share the units of one replica of the decoder in full separation."""
        return self.tp * self.pp // self.encoder_tp

    @property
    def weights(self) -> str:
        """Names the model that it trains, and its weights."""
        return f"{self.model}-{self.layers}{'-tied' if self.tied else ''}"

    def sizes(self) -> dict[str, object]:
        """What of the model's small likeness is the cell's, by keys below ``model``."""
        return {
            "foundation.num_layers": self.layers,
            "foundation.tie_word_embeddings": str(self.tied).lower(),
        }

    @property
    def reference(self) -> str:
        """Names the single rank's run that it is held against."""
        return self.weights

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        sizes = f"e{self.encoder_tp}t{self.tp}p{self.pp}v{self.vpp}d{self.dp}x{self.ep}"
        marks = [self.model, *([] if self.mode == UNIFORM else [self.mode]), sizes]
        marks += [self.optimizer, f"recompute-{self.recompute}"]
        marks += ["sp"] if self.sequence_parallel else []
        marks += ["tied"] if self.tied else []
        return "-".join([*marks, *(["balance"] if self.balance else [])])

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too, beside the model."""
        return []

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
            given += [f"model.{encoder}.recompute=true" for encoder in self.encoders]
        exchanged = self.mode in (ENCODER_DP, FULL)
        if exchanged:
            given += [f"--enable-{self.mode}"]
        if self.mode == FULL:
            given += ["--full-hetero-dp-schedule", "streamed" if self.streams else "separated"]
        if self.balance:
            given += ["--use-vit-dp-balance", "--dp-balance-trigger-threshold-vit", "0"]
        if self.heterogeneous or exchanged:  # whose encoder has TP 1 where none is given
            size = f"tensor_model_parallel_size={self.encoder_tp}"
            given += [f"model.{encoder}.{size}" for encoder in self.encoders]
        if self.optimizer != "plain":
            given += ["--use-distributed-optimizer"]
        if self.optimizer == "overlapped":
            given += ["--overlap-grad-reduce", "--overlap-param-gather"]
        return given


Pair = tuple[int, object, int, object]  # an axis by its place, its value, and another
AXES = tuple(field.name for field in fields(Cell))


def layouts(model: str) -> list[Cell]:
    """Every layout of the model in every mode, as far as they are possible, without options."""
    cells = (
        Cell(model=model, mode=mode, encoder_tp=encoder_tp, tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep)
        for mode in MODES
        for tp, pp, vpp, dp, ep, encoder_tp in product(SIZES, repeat=6)
    )
    return [cell for cell in cells if cell.possible]


def sequence_parallel_choices(layout: Cell) -> tuple[bool, ...]:
    """Whether the layout can be with or without it, or has to have it."""
    if layout.tp == 1:
        return (False,)
    return (True,) if "moe" in layout.model else (False, True)  # experts with TP ask for it


def tied_choices(layout: Cell) -> tuple[bool, ...]:
    """Qwen2-Audio's output layer is never the embeddings: transformers has none that is."""
    return (False,) if layout.model == "qwen2_audio_tiny" else (False, True)


def choices(layout: Cell) -> list[Cell]:
    """The layout with every choice of the options that it can have."""
    return [
        replace(
            layout,
            sequence_parallel=sequence,
            recompute=recompute,
            tied=tied,
            optimizer=optimizer,
            balance=balance,
        )
        for sequence, recompute, tied, optimizer, balance in product(
            sequence_parallel_choices(layout),
            RECOMPUTES,
            tied_choices(layout),
            OPTIMIZERS,
            (False, True) if layout.can_balance else (False,),
        )
    ]


def matrix(model: str) -> list[Cell]:
    """The model's cells: layouts in their modes, and more until every two axis values have met."""
    return one_of_each([choices(layout) for layout in layouts(model)], seed=model)


def few_cells(model: str) -> list[Cell]:
    """Cells of the model, until every value of an axis was in every mode that it can be in.

    One of them is heterogeneous TP, and one has an encoder of several stages.
    """
    everything = [cell for layout in layouts(model) for cell in choices(layout)]
    cells = few_of(everything, seed=model)
    for apart in (
        lambda cell: cell.mode == UNIFORM and cell.encoder_tp < cell.tp,
        lambda cell: cell.mode == FULL and cell.encoder_tp > cell.tp,
    ):
        if not any(apart(cell) for cell in cells):
            cells.append(next(cell for cell in everything if apart(cell)))
    return sorted(cells)


def few_of[CellT: Cell](everything: list[CellT], *, seed: str) -> list[CellT]:
    """Cells of ``everything``, which is shuffled, until each value was in each mode that it can."""
    cover = Cover[CellT](with_mode_alone=True)
    random.Random(seed).shuffle(everything)  # the layouts that are first have one rank
    candidates = [cover.candidate(cell) for cell in everything]
    while cover.wanted:
        cover.take_best(candidates)
    return sorted(cover.cells)


def one_of_each[CellT: Cell](everything: Sequence[list[CellT]], *, seed: str) -> list[CellT]:
    """A cell of each list, and more until every two axis values have met that can."""
    cover = Cover[CellT]()
    lists = [[cover.candidate(cell) for cell in possible] for possible in everything]
    generator = random.Random(seed)
    for possible in lists:
        generator.shuffle(possible)  # so that where nothing is wanted any more, options vary
        cover.take_best(possible)
    while cover.wanted:
        cover.take_best([candidate for possible in lists for candidate in possible])
    return sorted(cover.cells)


def covering[CellT: Cell](
    everything: Sequence[CellT], *, seed: str, candidates: int
) -> list[CellT]:
    """Few cells in which every two axis values meet: always the best of some candidates."""
    cover = Cover[CellT]()
    possible = [cover.candidate(cell) for cell in everything]
    generator = random.Random(seed)
    while cover.wanted:
        drawn = generator.sample(possible, min(candidates, len(possible)))
        if not any(found & cover.wanted for _, found in drawn):
            drawn = possible
        cover.take_best(drawn)
    return sorted(cover.cells)


class Cover[CellT: Cell]:
    """Cells that are taken one by one, each for the pairs of values that those before lack.

    A pair is a bit, and a cell that may be taken an integer of them: a matrix looks at eighty
    thousand cells, and each has up to a hundred pairs. ``with_mode_alone``: only pairs of the first
    axis, the mode, count.
    """

    MOST_VALUES = 128  # of all axes

    def __init__(self, *, with_mode_alone: bool = False) -> None:
        self._with_mode_alone = with_mode_alone
        self._numbers: dict[tuple[int, object], int] = {}  # of a value of an axis
        self.wanted = 0
        self.cells: list[CellT] = []

    def candidate(self, cell: CellT) -> tuple[CellT, int]:
        """The cell with its pairs, which are wanted from now on."""
        found = met = 0
        for value in [*enumerate(vars(cell).values())][1:]:
            number = self._numbers.setdefault(value, len(self._numbers))
            assert number < self.MOST_VALUES
            found |= met << (number * self.MOST_VALUES)  # it meets those of the axes before
            if not (met and self._with_mode_alone):
                met |= 1 << number
        self.wanted |= found
        return cell, found

    def take_best(self, candidates: Sequence[tuple[CellT, int]]) -> None:
        """Take the first of those that have most of what is wanted."""
        cell, found = max(candidates, key=lambda each: (each[1] & self.wanted).bit_count())
        self.cells.append(cell)
        self.wanted &= ~found


def pairs(cell: Cell) -> set[Pair]:
    """Every two values of two axes that meet in the cell."""
    axes = [*enumerate(vars(cell).values())][1:]
    return {(*one, *other) for one, other in combinations(axes, 2)}


def layout_cells() -> list[Cell]:
    """Those of models that see alone."""
    every = [cell for model in MODELS for cell in matrix(model)]
    return every + [cell for model in MORE_MODELS for cell in few_cells(model)]


def hearing_cells() -> list[Cell]:
    """Those of models that hear; one of them sees too."""
    return [cell for model in HEARING_MODELS for cell in few_cells(model)]


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
    return sorted(_in_turn(by_model, number), key=lambda cell: cell.order)


def _modes_in_turn(
    cells: Sequence[Cell], generator: random.Random, *, first: int
) -> Iterator[Cell]:
    first %= len(MODES)
    turned = (*MODES[first:], *MODES[:first])
    by_mode = [[cell for cell in cells if cell.mode == mode] for mode in turned]
    shuffled = [iter(generator.sample(mine, len(mine))) for mine in by_mode]
    return iter(_in_turn(shuffled, len(cells)))


def _in_turn(streams: Sequence[Iterator[Cell]], number: int) -> list[Cell]:
    taken: list[Cell] = []
    while len(taken) < number:
        before = len(taken)
        for stream in streams:
            taken += [cell for cell in [next(stream, None)] if cell is not None]
        if len(taken) == before:
            break
    return taken[:number]
