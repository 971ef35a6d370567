"""The parity matrix's cells whose rows lie on several ranks. Pure and the same every time."""

from dataclasses import dataclass, replace
from itertools import product
from math import lcm

from parity.cells import (
    MODELS,
    MOST_RANKS,
    UNIFORM,
    covering,
    sequence_parallel_choices,
)
from parity.saving_cells import TrainedCell, one_word

CPS = (2, 3, 4)
COMM_TYPES = ("all_gather", "a2a", "p2p")
# How samples lie in rows, by the flags for it: to the layout, and to the single rank as well.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "padded": ((), ()),
    "packs, zigzag": ((), ("--packing",)),
    "packs, lpt": (("--cp-balance", "lpt"), ("--packing",)),
}
_SIZES = (1, 2)
_TRAINED = ("all", "all but the encoder", "decoder's LoRA")
_KEY_HEADS = 4  # of the small models
_CANDIDATES = 400  # that are looked at for the next cell


@dataclass(frozen=True, kw_only=True, order=True)
class ContextCell(TrainedCell):
    """One run in which ``cp`` ranks share each row."""

    cp: int = 2
    rows: str = "padded"
    comm: str = "all_gather"

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.cp * super().ranks

    @property
    def divides(self) -> int:
        """Any of the layouts can split such rows."""
        return lcm(*(2 * cp for cp in CPS))

    @property
    def possible(self) -> bool:
        """Whether it fits the ranks; experts may lie on those that share a row, too."""
        return (
            self.ranks <= MOST_RANKS
            and self.tp % self.encoder_tp == 0
            and (self.pp > 1 or self.vpp == 1)
            and self.tp * self.dp * self.cp % self.ep == 0
            and ("moe" in self.model or self.ep == 1)
        )

    @property
    def can_communicate(self) -> bool:
        """Whether keys can come in this way: a2a deals out heads, p2p takes a zigzag."""
        if self.comm == "a2a":
            return _KEY_HEADS // self.tp % self.cp == 0
        return self.comm != "p2p" or self.rows != "packs, lpt"

    @property
    def reference(self) -> str:
        """Names the single rank's run, with the same rows in which the same trains."""
        packed = "packed" if self.rows != "padded" else "padded"
        return f"{super().reference}-rows-{packed}"

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        marks = (f"c{self.cp}", self.comm, one_word(self.rows), one_word(self.trained))
        return "-".join([super().name, *marks])

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too."""
        return [*super().shared_flags(), *ROWS[self.rows][1]]

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        shared = ("--context-parallel-size", str(self.cp), "--cp-comm-type", self.comm)
        return [*super().flags(), *shared, *ROWS[self.rows][0]]


def context_cells() -> list[ContextCell]:
    """All of them."""
    return [
        cell
        for model in MODELS
        for cell in covering(possible_cells(model), seed=model, candidates=_CANDIDATES)
    ]


def possible_cells(model: str) -> list[ContextCell]:
    """Every layout with every choice of the options that it can have."""
    every = (
        replace(
            layout,
            sequence_parallel=sequence,
            recompute=recompute,
            optimizer=optimizer,
            trained=trained,
            rows=rows,
            comm=comm,
        )
        for layout in _layouts(model)
        for sequence, recompute, optimizer, trained, rows, comm in product(
            sequence_parallel_choices(layout),
            ("none", "both"),
            ("plain", "overlapped"),
            _TRAINED,
            ROWS,
            COMM_TYPES,
        )
    )
    return [cell for cell in every if cell.can_communicate]


def _layouts(model: str) -> list[ContextCell]:
    cells = (
        ContextCell(
            model=model,
            mode=UNIFORM,
            encoder_tp=encoder_tp,
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            ep=ep,
        )
        for cp in CPS
        for encoder_tp, tp, pp, vpp, dp, ep in product(_SIZES, repeat=6)
    )
    return [cell for cell in cells if cell.possible]
