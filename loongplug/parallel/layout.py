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
    """Where a rank is in its module's two grids; ``pp`` is the same in both."""

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

    Raises:
        ValueError: a size is no positive integer, or the experts' sizes do not divide a stage.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    first_rank: int = 0

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for name in ("tp", "cp", "pp", "dp", "ep", "etp"):
            _require_whole(name, getattr(self, name), least=1)
        _require_whole("first_rank", self.first_rank, least=0)
        if self.stage_size % (self.etp * self.ep):
            raise ValueError(
                f"experts do not fit: etp {self.etp} x ep {self.ep} must divide the "
                f"{self.stage_size} ranks of a pipeline stage (tp {self.tp} x cp {self.cp} x "
                f"dp {self.dp}). Choose other sizes of expert parallelism, or more ranks."
            )

    @property
    def stage_size(self) -> int:
        """The ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """The ranks of the module."""
        return self.stage_size * self.pp

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
        axes = _axes_of(kind)
        inside = set(kind.split("_"))
        members = [axis for axis in axes if axis in inside]
        others = [axis for axis in axes if axis not in inside]
        return [
            [self.first_rank + start + offset for offset in self._offsets(axes, members)]
            for start in self._offsets(axes, others)
        ]

    def group(self, kind: str, rank: int) -> list[int]:
        """The group of ``kind`` (see :meth:`groups`) that has ``rank`` in it."""
        axes = _axes_of(kind)
        inside = set(kind.split("_"))
        place = self._place(axes, rank)
        strides = self._strides(axes)
        start = rank - sum(place[axis] * strides[axis] for axis in inside)
        members = [axis for axis in axes if axis in inside]
        return [start + offset for offset in self._offsets(axes, members)]

    def _place(self, axes: tuple[str, ...], rank: int) -> dict[str, int]:
        if rank not in self.ranks:
            raise ValueError(
                f"rank {rank} is none of this layout's: it has ranks {self.ranks.start} to "
                f"{self.ranks.stop - 1}."
            )
        strides = self._strides(axes)
        index = rank - self.first_rank
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

    Without pipeline, context or expert parallelism: what ``tp`` leaves of the ranks is data
    parallel. The ranks are those of the decoder's first stage, or with ``on_first_stage=False``
    all of the decoder's.

    Raises:
        ValueError: ``tp`` does not divide the decoder's.
    """
    allowed = [size for size in range(1, decoder.tp + 1) if decoder.tp % size == 0]
    if tp not in allowed:
        raise ValueError(
            f"the encoder's tensor_model_parallel_size is {tp}: it has to divide the decoder's, "
            f"which is {decoder.tp}. Set tensor_model_parallel_size in the encoder's YAML to "
            f"{_one_of(allowed)}."
        )
    ranks = decoder.stage_size if on_first_stage else decoder.world_size
    return Layout(tp=tp, dp=ranks // tp, first_rank=decoder.first_rank)


def _axes_of(kind: str) -> tuple[str, ...]:
    named = kind.split("_")
    for axes in (_DENSE_AXES, _EXPERT_AXES):
        if set(named) <= set(axes) and len(set(named)) == len(named):
            return axes
    raise ValueError(
        f"group kind {kind!r} is unknown: expected axes joined by '_', each once, either of "
        f"{', '.join(_DENSE_AXES)} or of {', '.join(_EXPERT_AXES)}."
    )


def _require_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}.")


def _one_of(sizes: list[int]) -> str:
    *first, last = (str(size) for size in sizes)
    return f"{', '.join(first)} or {last}" if first else last
