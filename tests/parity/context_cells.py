"""The parity matrix's cells whose rows lie on several ranks. Pure and the same every time."""

from dataclasses import dataclass, replace
from itertools import product
from math import lcm, prod

from parity.cells import (
    ENCODER_DP,
    FULL,
    MODELS,
    MODES,
    MOST_RANKS,
    covering,
    few_of,
    sequence_parallel_choices,
)
from parity.overlap_cells import KEPT
from parity.placement_cells import TWO, own_flags, sizes_of
from parity.saving_cells import AWAY, TrainedCell, one_word

CPS = (2, 3, 4)
APART = "apart"  # encoders on ranks of their own
CONTEXT_MODES = (*MODES, APART)
COMM_TYPES = ("all_gather", "a2a", "p2p")
# How samples lie in rows, by the flags for it: to the layout, and to the single rank as well.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "padded": ((), ()),
    "packs, zigzag": ((), ("--packing",)),
    "packs, lpt": (("--cp-balance", "lpt"), ("--packing",)),
}
# TP/PP/DP of each encoder on ranks of its own, by how many there are.
OWN = {1: ("1/1/1", "1/1/2"), 2: ("1/1/1|1/1/1", "2/1/1|1/1/2")}
_AWAY = ("nothing", "all three")
_SIZES = (1, 2)
_TRAINED = ("all", "all but the encoder", "decoder's LoRA")
_KEY_HEADS = 4  # of the small models
_CANDIDATES = 400  # that are looked at for the next cell


@dataclass(frozen=True, kw_only=True, order=True)
class ContextCell(TrainedCell):
    """One run in which ``cp`` ranks share each row.

    ``own`` has TP/PP/DP of each encoder on ranks of its own, and nothing where encoders lie on
    the decoder's. ``away`` is what leaves the device in phase 2.
    """

    cp: int = 2
    rows: str = "padded"
    comm: str = "all_gather"
    away: str = "nothing"
    own: str = ""

    @property
    def decoder_ranks(self) -> int:
        """The first of all."""
        return self.cp * super().ranks

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.decoder_ranks + sum(map(prod, sizes_of(self.own)))

    @property
    def encoder_replicas(self) -> int:
        """That share the units of one replica of the decoder in full separation."""
        return self.cp * super().encoder_replicas

    @property
    def divides(self) -> int:
        """Any of the layouts can split such rows."""
        return lcm(*(2 * cp for cp in CPS))

    @property
    def possible(self) -> bool:
        """Whether it fits the ranks; experts may lie on those that share a row, too."""
        return (
            self.ranks <= MOST_RANKS
            and (self.tp % self.encoder_tp == 0 or self._on_several_stages)
            and (self.mode != APART or self.encoder_tp == self.tp)
            and (self.pp > 1 or self.vpp == 1)
            and self.tp * self.dp * self.cp % self.ep == 0
            and ("moe" in self.model or self.ep == 1)
        )

    @property
    def _on_several_stages(self) -> bool:
        """Whether a replica of the encoder makes up whole stages, each of all parts of a row."""
        stages, rest = divmod(self.encoder_tp, self.tp * self.cp)
        return self.mode == FULL and rest == 0 and stages > 0 and self.pp % stages == 0

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
        marks = [f"c{self.cp}", self.comm, one_word(self.rows), one_word(self.trained)]
        marks += [] if self.away == "nothing" else [f"away-{one_word(self.away)}"]
        marks += [f"own-{self.own.replace('/', '.').replace('|', '+')}"] if self.own else []
        return "-".join([super().name, *marks])

    def shared_flags(self) -> list[str]:
        """What the single rank is given, too."""
        return [*super().shared_flags(), *ROWS[self.rows][1]]

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        shared = ("--context-parallel-size", str(self.cp), "--cp-comm-type", self.comm)
        own = own_flags(self.encoders, sizes_of(self.own), first=self.decoder_ranks)
        return [*super().flags(), *shared, *ROWS[self.rows][0], *AWAY[self.away], *own]


@dataclass(frozen=True, kw_only=True, order=True)
class StreamedContextCell(ContextCell):
    """The same in full separation, streamed."""

    schedule: str = "streamed"

    @property
    def streams(self) -> bool:
        """Whether its encoders work in the pipeline's bubbles."""
        return True

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        return f"{super().name}-{self.schedule}"


@dataclass(frozen=True, kw_only=True, order=True)
class OverlappedContextCell(ContextCell):
    """The same with the experts' exchange overlapped.

    It is also held, bit by bit, against its twin: the same layout with neither the overlap nor
    what goes with it. ``kept`` is what stays of a layer's activations.
    """

    kept: str = "all"
    delayed: bool = False

    @property
    def name(self) -> str:
        """A short one that tells cells apart."""
        marks = [super().name, "overlap", f"kept-{one_word(self.kept)}"]
        return "-".join([*marks, *(["delayed"] if self.delayed else [])])

    def twin_flags(self) -> list[str]:
        """The same layout without the overlap."""
        return super().flags()

    def flags(self) -> list[str]:
        """The layout and its options as training's flags."""
        delayed = ["--delay-wgrad-compute"] if self.delayed else []
        overlap = "--overlap-moe-expert-parallel-comm"
        return [*self.twin_flags(), overlap, *KEPT[self.kept], *delayed]


_EXPERTS = OverlappedContextCell(model=MODELS[1], ep=2)
_CHUNKS = replace(_EXPERTS, pp=2, vpp=2)  # stages without virtual ones are refused
# Every mode, split, way to come by keys and thing that is kept; experts on the ranks of a row.
OVERLAPPED = (
    replace(_EXPERTS, cp=4, ep=4, rows="packs, zigzag", comm="a2a", trained="decoder's LoRA"),
    replace(_EXPERTS, mode=FULL, cp=3, dp=2, rows="packs, lpt", kept="tensors away"),
    replace(_CHUNKS, optimizer="overlapped", recompute="encoder"),
    replace(_CHUNKS, mode=ENCODER_DP, rows="packs, zigzag", comm="p2p", kept="nodes recomputed"),
    replace(_CHUNKS, mode=FULL, rows="packs, lpt", comm="a2a", kept="both", delayed=True),
    replace(_CHUNKS, mode=APART, own=OWN[1][0], trained="all but the encoder", delayed=True),
    replace(_CHUNKS, tp=2, ep=4, sequence_parallel=True, comm="p2p", delayed=True),
)

# Two stages of two ranks a row: rows and both splits of packs, each way to come by keys.
STREAMED = (
    StreamedContextCell(model=MODELS[0], mode=FULL, pp=2),
    StreamedContextCell(
        model=MODELS[0],
        mode=FULL,
        pp=2,
        vpp=2,
        rows="packs, lpt",
        comm="a2a",
        recompute="both",
        optimizer="overlapped",
    ),
    StreamedContextCell(model=MODELS[1], mode=FULL, pp=2, ep=2, rows="packs, zigzag", comm="p2p"),
)


def context_cells() -> list[ContextCell]:
    """All of them; of the model with two encoders, and of those that stream or overlap, few."""
    whole = [
        cell
        for model in MODELS
        for cell in covering(possible_cells(model), seed=model, candidates=_CANDIDATES)
    ]
    return [*whole, *few_of(possible_cells(TWO), seed=TWO), *STREAMED, *OVERLAPPED]


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
            balance=balance,
            away=away,
        )
        for layout in _layouts(model)
        for sequence, recompute, optimizer, trained, rows, comm, balance, away in product(
            sequence_parallel_choices(layout),
            ("none", "both"),
            ("plain", "overlapped"),
            _TRAINED,
            ROWS,
            COMM_TYPES,
            (False, True) if layout.can_balance else (False,),
            _AWAY if layout.mode == FULL else ("nothing",),
        )
    )
    return [cell for cell in every if cell.can_communicate]


def _layouts(model: str) -> list[ContextCell]:
    apart = OWN[2 if model == TWO else 1]
    cells = (
        ContextCell(
            model=model,
            mode=mode,
            own=own,
            encoder_tp=encoder_tp,
            tp=tp,
            cp=cp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            ep=ep,
        )
        for cp in CPS
        for mode, own in (*((mode, "") for mode in MODES), *((APART, each) for each in apart))
        for encoder_tp, tp, pp, vpp, dp, ep in product(_SIZES, repeat=6)
    )
    return [cell for cell in cells if cell.possible]
