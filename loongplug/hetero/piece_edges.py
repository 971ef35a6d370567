"""Features of one piece to the decoder's first stage, and their gradient back, at any time.

Within a model replica, where an encoder lies on all ranks. A rank may be at both ends; what it has
itself it does not send. All ranks know all pieces of a step, numbered in the order of microbatches
and of the pieces within each, and who encodes which.

An encoder replica sends its pieces in that order, and takes their gradients in it; a consumer takes
all pieces, and gives gradients, in it, too. So the messages from one rank to another are in one
order at both ends.

There is one group for features to higher ranks and one for those to lower ranks, and two for
gradients: ranks of a tensor parallel group send each other features both ways, and each posts
receives early. In one queue for both, each could wait for the other.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from loongplug.hetero.communicators import piece_pairs
from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import feature_transfers, gradient_transfers, size
from loongplug.hetero.wire import Ends, Over, PieceEnd, PieceMessage, Wire
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.connections import connected_group


def create_piece_groups(
    name: str, edges: Sequence[Edge], *, parts: int, **options: Any
) -> Mapping[Cargo, Over] | None:
    """The groups of this rank's edge of the encoder ``name``, connected; None where it has none.

    ``edges`` are those of all model replicas, of sequences in so many ``parts``; ``options`` are
    :func:`connected_group`'s. Collective over the world.
    """
    found: dict[Cargo, Over] = {}
    for what in (Cargo.FEATURES, Cargo.GRADIENTS):
        up, down = (
            connected_group(
                f"{name}_{what.said}_{'up' if up else 'down'}",
                [edge.ranks for edge in edges],
                chain(*(piece_pairs(edge, back=what.back, up=up, parts=parts) for edge in edges)),
                options_of="mp",
                **options,
            )
            for up in (True, False)
        )
        if up is not None and down is not None:
            found[what] = _up_and_down(up, down)
    return found or None


def _up_and_down(up: dist.ProcessGroup, down: dist.ProcessGroup) -> Over:
    """One group to higher ranks and one to lower ones."""
    return lambda source, target: up if source < target else down


def piece_wire(
    edge: Edge,
    groups: Mapping[Cargo, Over],
    *,
    device: torch.device,
    recorder: Recorder = NOTHING,
) -> Wire[ExchangeSpec]:
    """One rank's ends of all edges of its model replica. In a step's spec, pieces are units.

    Nobody waits for a send: all pieces of a step may be under way.
    """
    ends = partial(piece_ends, edge=edge, rank=dist.get_rank())
    return Wire(groups, ends=ends, most=inf, device=device, recorder=recorder)


def piece_ends(what: Cargo, pieces: ExchangeSpec, *, edge: Edge, rank: int) -> Ends:
    """What ``rank`` gives and takes of a step's pieces: all are numbered, most without messages."""
    numbers, parts = range(len(pieces.tokens)), pieces.parts
    given: list[list[PieceMessage]] = [[] for _ in numbers]
    taken: list[list[PieceMessage]] = [[] for _ in numbers]
    transfers = gradient_transfers if what.back else feature_transfers
    for each in transfers(edge, pieces.encoder_replicas, parts=parts):
        if rank not in (each.source, each.target):
            continue
        of_piece = pieces.rows(each)
        consumed = (slice(0, size(of_piece)),)  # all that the consumer has of it
        if not size(of_piece):
            continue
        if rank == each.source:
            rows = consumed if what.back else of_piece
            given[each.unit].append(PieceMessage(peer=each.target, rows=rows))
        if rank == each.target:
            rows = of_piece if what.back else consumed
            taken[each.unit].append(PieceMessage(peer=each.source, rows=rows))
    part = edge.part_of(rank, parts=parts) if rank in edge.consumers else 0
    needed = tuple(size(pieces.of_parts(piece)[part]) for piece in numbers)
    there, back = (needed, pieces.tokens) if what.back else (pieces.tokens, needed)
    return Ends(
        given={n: PieceEnd(rows=there[n], messages=tuple(given[n])) for n in numbers},
        taken={n: PieceEnd(rows=back[n], messages=tuple(taken[n])) for n in numbers},
        width=pieces.width,
        dtype=pieces.dtype,
    )
