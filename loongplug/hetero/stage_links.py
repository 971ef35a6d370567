"""Between the pipeline stages of an encoder on ranks of its own: states, and their gradients."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from loongplug.hetero.operations import Cargo
from loongplug.hetero.wire import Ends, PieceEnd, PieceMessage, Wire
from loongplug.observe.recorder import NOTHING, Recorder


@dataclass(frozen=True, kw_only=True)
class StageLink:
    """The rank of a neighbouring stage that this one exchanges with.

    It has this rank's tensor and data parallel coordinates. ``there`` is the process group of
    states, from the earlier stage to the later one, ``back`` that of their gradients. ``width`` is
    that of a payload.
    """

    peer: int
    there: dist.ProcessGroup
    back: dist.ProcessGroup
    width: int


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What stages know of the units of a step: ``rows`` of states, and of which microbatch each."""

    rows: tuple[int, ...]
    microbatches: tuple[int, ...]
    dtype: torch.dtype


def stage_wire(
    *,
    before: StageLink | None,
    behind: StageLink | None,
    in_flight: int,
    device: torch.device,
    recorder: Recorder = NOTHING,
) -> Wire[StageSpec]:
    """One rank's links to the stages before and behind its own, where there are such."""
    rank, there, back = dist.get_rank(), {}, {}  # groups, by source and target
    if before is not None:
        there[before.peer, rank], back[rank, before.peer] = before.there, before.back
    if behind is not None:
        there[rank, behind.peer], back[behind.peer, rank] = behind.there, behind.back
    return Wire(
        {
            Cargo.STATES: lambda source, target: there[source, target],
            Cargo.STATE_GRADIENTS: lambda source, target: back[source, target],
        },
        ends=partial(stage_ends, before=before, behind=behind),
        most=in_flight,
        device=device,
        recorder=recorder,
    )


def stage_ends(
    what: Cargo, spec: StageSpec, *, before: StageLink | None, behind: StageLink | None
) -> Ends:
    """What a stage gives and takes of a step's units."""

    def of(link: StageLink | None) -> dict[int, PieceEnd]:
        numbered = enumerate(zip(spec.rows, spec.microbatches, strict=True))
        return {
            unit: PieceEnd(
                rows=rows,
                messages=(PieceMessage(peer=link.peer, rows=(slice(0, rows),)),),
                microbatch=microbatch,
            )
            for unit, (rows, microbatch) in numbered
            if link is not None
        }

    giver, taker = (behind, before) if what.back else (before, behind)
    width = 0 if giver is None else giver.width
    return Ends(given=of(taker), taken=of(giver), width=width, dtype=spec.dtype)
