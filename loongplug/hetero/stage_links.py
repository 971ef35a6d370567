"""Between the pipeline stages of an encoder on ranks of its own: states, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loongplug.hetero.operations import Cargo
from loongplug.hetero.wire import Ends, PieceEnd, PieceMessage
from loongplug.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """The rank of a neighbouring stage that this one exchanges with.

    It has this rank's tensor and data parallel coordinates. ``width`` is that of a payload.
    """

    peer: int
    width: int


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What stages know of the units of a step: ``rows`` of states, and of which microbatch each."""

    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    dtype: torch.dtype


def stage_links(
    layout: Layout, rank: int, *, widths: Sequence[int]
) -> tuple[StageLink | None, StageLink | None]:
    """A rank's to the stages before and behind its own, where there are such.

    ``widths`` are those of what each stage of ``layout`` but the last hands on.
    """
    if rank not in layout.ranks:
        return None, None
    stage, pipeline = layout.coordinates(rank).pp, layout.group("pp", rank)
    before = StageLink(peer=pipeline[stage - 1], width=widths[stage - 1]) if stage else None
    if stage == layout.pp - 1:
        return before, None
    return before, StageLink(peer=pipeline[stage + 1], width=widths[stage])


def stage_ends(
    what: Cargo, spec: StageSpec, *, before: StageLink | None, behind: StageLink | None
) -> Ends:
    """What a stage gives and takes of a step's units."""

    def of(link: StageLink | None) -> dict[int, PieceEnd]:
        numbered = enumerate(zip(spec.rows, spec.microbatches, strict=True))
        return {
            unit: PieceEnd(
                messages=(PieceMessage(peer=link.peer, rows=(slice(0, rows),)),),
                microbatch=microbatch,
            )
            for unit, (rows, microbatch) in numbered
            if link is not None
        }

    giver, taker = (behind, before) if what.back else (before, behind)
    width = 0 if giver is None else giver.width
    return Ends(given=of(taker), taken=of(giver), width=width, dtype=spec.dtype)
