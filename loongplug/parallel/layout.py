"""The parallel layout of one module: sizes, ranks, and the arithmetic between them.

Nothing here talks to other ranks. The order of the ranks is Megatron's default, "tp-cp-ep-dp-pp":
the tensor parallel coordinate changes fastest from rank to rank, the pipeline stage slowest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

# Fastest first. Experts have a grid of their own over the same ranks, stage by stage.
_DENSE_AXES = ("tp", "cp", "dp", "pp")
_EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """A rank's place in its module's two grids; ``pp`` is the same in both."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a module is spread over the ranks from ``first_rank`` on.

    ``tp``, ``cp``, ``dp`` and ``pp`` span ``world_size`` ranks. Experts are spread over the same
    ranks by ``etp`` (expert tensor parallel; 0, the default, stands for ``tp``), ``ep`` and
    ``pp``, and what is left over is ``edp``, the expert data parallel size.

    ``order`` has the ranks in the order in which they fill the grids, where that is not their own.

    Raises:
        ValueError: a size is below 1, the experts' sizes do not divide a stage, or the order is
            not one of these ranks.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    first_rank: int = 0
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        sizes = (self.tp, self.cp, self.pp, self.dp, self.ep, self.etp)
        if min(sizes) < 1 or self.first_rank < 0:
            raise ValueError(f"{self}: expected sizes of at least 1 and a rank of at least 0.")
        if self.stage_size % (self.etp * self.ep):
            raise ValueError(
                f"experts do not fit: etp {self.etp} x ep {self.ep} must divide the "
                f"{self.stage_size} ranks of a pipeline stage (tp {self.tp} x cp {self.cp} x "
                f"dp {self.dp}). Choose other sizes of expert parallelism, or more ranks."
            )
        if self.order and sorted(self.order) != list(self.ranks):
            raise ValueError(
                f"the order {self.order} is none of the ranks {self.ranks.start} to "
                f"{self.ranks.stop - 1}: name each of them once."
            )

    @property
    def stage_size(self) -> int:
        """The ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """The ranks of the module."""
        return self.stage_size * self.pp

    def sequence_shards(self, *, sequence_parallel: bool) -> int:
        """In how many shards a row's tokens lie on the ranks of a stage's replica.

        Tensor parallel ranks hold the same tokens of a context parallel part, but with sequence
        parallelism.
        """
        return self.cp * (self.tp if sequence_parallel else 1)

    @property
    def ranks(self) -> range:
        """The module's ranks, as torch.distributed's default group counts them."""
        return range(self.first_rank, self.first_rank + self.world_size)

    @property
    def edp(self) -> int:
        """Expert data parallel size: how many ranks hold the same part of the same expert."""
        return self.stage_size // (self.etp * self.ep)

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank; ValueError when the module has no such rank."""
        dense = self._place(_DENSE_AXES, rank)
        return Coordinates(**dense, **(self._place(_EXPERT_AXES[:-1], rank)))

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of a kind, each in the order of its ranks.

        ``kind`` names the axes that change within a group, joined by "_": of tp, cp, dp and pp
        ("tp", "dp_cp", "tp_pp"), or of the experts' etp, ep, edp and pp ("ep", "etp_ep_pp").
        Ranks of a group differ in these coordinates only. The order of the groups, and of the
        ranks in them, is Megatron's.

        Raises:
            ValueError: an axis is unknown or named twice, or dense and expert axes are mixed.
        """
        axes, members = _axes_of(kind)
        others = [axis for axis in axes if axis not in members]
        return [self._members(axes, members, start=start) for start in self._offsets(axes, others)]

    def group(self, kind: str, rank: int) -> list[int]:
        """The group of ``kind`` (see :meth:`groups`) that has ``rank`` in it."""
        axes, members = _axes_of(kind)
        place = self._place(axes, rank)
        strides = self._strides(axes)
        start = self._index(rank) - sum(place[axis] * strides[axis] for axis in members)
        return self._members(axes, members, start=start)

    def stage(self, number: int) -> list[list[int]]:
        """The ranks of a pipeline stage, replica by replica; -1 is the last."""
        # The groups of one stage follow one another, by replica.
        first = number % self.pp * self.dp
        return self.groups("tp_cp")[first : first + self.dp]

    def _members(self, axes: tuple[str, ...], changing: list[str], *, start: int) -> list[int]:
        """The ranks of a group, ascending, as torch.distributed orders them."""
        ranks = self.order or self.ranks
        return sorted(ranks[start + offset] for offset in self._offsets(axes, changing))

    def _index(self, rank: int) -> int:
        """A rank's place in the grids of some axes."""
        return self.order.index(rank) if self.order else rank - self.first_rank

    def _place(self, axes: tuple[str, ...], rank: int) -> dict[str, int]:
        if rank not in self.ranks:
            raise ValueError(
                f"rank {rank} is none of this layout's: it has ranks {self.ranks.start} to "
                f"{self.ranks.stop - 1}."
            )
        strides = self._strides(axes)
        index = self._index(rank)
        return {axis: index // strides[axis] % getattr(self, axis) for axis in axes}

    def _strides(self, axes: tuple[str, ...]) -> dict[str, int]:
        strides, stride = {}, 1
        for axis in axes:
            strides[axis] = stride
            stride *= getattr(self, axis)
        return strides

    def _offsets(self, axes: tuple[str, ...], changing: list[str]) -> Iterator[int]:
        """Distances of ranks that differ in ``changing`` only, the first axis fastest."""
        strides = self._strides(axes)
        slowest_first = changing[::-1]
        for place in product(*(range(getattr(self, axis)) for axis in slowest_first)):
            yield sum(at * strides[axis] for at, axis in zip(place, slowest_first, strict=True))


def encoder_layout(decoder: Layout, *, tp: int, on_first_stage: bool) -> Layout:
    """The layout of an encoder with a tensor parallel size of its own beside ``decoder``.

    Without stages, context or expert parallelism: what ``tp`` leaves of the ranks is data
    parallel. With ``on_first_stage`` these are the ranks of the decoder's first stage alone. Else
    its replicas lie on all of the decoder's ranks, and one of them may lie on several whole
    stages.

    Raises:
        ValueError: ``tp`` is none of :func:`encoder_sizes`.
    """
    allowed = encoder_sizes(decoder, on_first_stage=on_first_stage)
    if tp not in allowed:
        raise ValueError(
            f"the encoder's tensor_model_parallel_size is {tp}: it has to divide the decoder's, "
            f"which is {decoder.tp}{'' if on_first_stage else ', or to fill whole stages'}. Set "
            f"tensor_model_parallel_size in the encoder's YAML to one of {allowed}."
        )
    ranks = decoder.stage_size if on_first_stage else decoder.world_size
    order: tuple[int, ...] = ()
    if tp > decoder.tp and not on_first_stage:
        # What is one behind the other in a grid is one replica, and the ranks of a replica of the
        # decoder that are one behind the other are of neighbouring stages.
        replicas = decoder.groups("tp_cp_pp")
        starts = range(0, len(replicas[0]), tp)
        order = tuple(
            rank for start in starts for ranks in replicas for rank in ranks[start : start + tp]
        )
    return Layout(tp=tp, dp=ranks // tp, first_rank=decoder.first_rank, order=order)


def encoder_sizes(decoder: Layout, *, on_first_stage: bool) -> list[int]:
    """The tensor parallel sizes that an encoder beside ``decoder`` can have.

    They divide the decoder's, or, where it lies on all stages, make up whole ones of these.
    """
    sizes = [size for size in range(1, decoder.tp + 1) if decoder.tp % size == 0]
    stages = 1 if on_first_stage else decoder.pp
    wide = [
        count * decoder.tp * decoder.cp for count in range(1, stages + 1) if stages % count == 0
    ]
    return sorted({*sizes, *(size for size in wide if size > decoder.tp)})


def _axes_of(kind: str) -> tuple[tuple[str, ...], list[str]]:
    """The axes of the grid, and those of them that change within a group."""
    named = kind.split("_")
    for axes in (_DENSE_AXES, _EXPERT_AXES):
        if set(named) <= set(axes) and len(set(named)) == len(named):
            return axes, [axis for axis in axes if axis in named]
    raise ValueError(
        f"group kind {kind!r} is unknown: expected axes joined by '_', each once, either of "
        f"{', '.join(_DENSE_AXES)} or of {', '.join(_EXPERT_AXES)}."
    )
