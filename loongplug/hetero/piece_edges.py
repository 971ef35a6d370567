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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from loongplug.hetero.exchange import ExchangeSpec
from loongplug.hetero.placement import Edge
from loongplug.hetero.routes import feature_transfers, gradient_transfers, size, used_pairs
from loongplug.hetero.wire import Ends, Message, Over, PieceEnd, What, Wire
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.parallel.connections import connected_group

# Of a model replica, by what goes there: to higher and to lower ranks.
PieceGroups = Mapping[What, tuple[dist.ProcessGroup, dist.ProcessGroup]]


def create_piece_groups(
    name: str, edges: Sequence[Edge], *, parts: int, **options: Any
) -> PieceGroups | None:
    """The groups of this rank's edge of the encoder ``name``, connected; None where it has none.

    ``edges`` are those of all model replicas, of sequences in so many ``parts``; ``options`` are
    :func:`connected_group`'s. Collective over the world.
    """
    found = {}
    for what in (What.FEATURES, What.GRADIENTS):
        pairs = [pair for edge in edges for pair in used_pairs(edge, back=what.back, parts=parts)]
        up, down = (
            connected_group(
                f"{name}_{what.said}_{'up' if up else 'down'}",
                [edge.ranks for edge in edges],
                [(source, target) for source, target in pairs if up == (source < target)],
                options_of="mp",
                **options,
            )
            for up in (True, False)
        )
        if up is not None and down is not None:
            found[what] = up, down
    return found or None


def piece_wire(
    edge: Edge, groups: PieceGroups, *, device: torch.device, recorder: Recorder = NOTHING
) -> Wire[ExchangeSpec]:
    """One rank's ends of all edges of its model replica. In a step's spec, pieces are units.

    Nobody waits for a send: all pieces of a step may be under way.
    """

    def over(what: What) -> Over:
        return lambda source, target: groups[what][source > target]

    return Wire(
        {what: over(what) for what in groups},
        ends=partial(piece_ends, edge=edge, rank=dist.get_rank()),
        most=inf,
        device=device,
        recorder=recorder,
    )


def piece_ends(what: What, pieces: ExchangeSpec, *, edge: Edge, rank: int) -> Ends:
    """What ``rank`` gives and takes of a step's pieces. The same on every rank but for that."""
    owners, parts = pieces.encoder_replicas, pieces.parts
    transfers = gradient_transfers if what.back else feature_transfers
    encoded: defaultdict[int, list[Message]] = defaultdict(list)  # by piece
    consumed: defaultdict[int, list[Message]] = defaultdict(list)
    for each in transfers(edge, owners, parts=parts):
        ends = (each.source, each.target)
        encoder, consumer = reversed(ends) if what.back else ends
        if rank not in ends or not (count := size(rows := pieces.rows(each))):
            continue
        if rank == encoder:
            encoded[each.unit].append(Message(peer=consumer, rows=rows))
        if rank == consumer:
            consumed[each.unit].append(Message(peer=encoder, rows=(slice(0, count),)))
    made = {
        piece: PieceEnd(rows=pieces.tokens[piece], messages=tuple(encoded[piece]))
        for piece, replicas in enumerate(owners)
        if edge.replica_of(rank) in replicas
    }
    needed = {}
    if rank in edge.consumers:
        part = edge.part_of(rank, parts=parts)
        needed = {
            piece: PieceEnd(
                rows=size(pieces.of_parts(piece)[part]), messages=tuple(consumed[piece])
            )
            for piece in range(len(owners))
        }
    given, taken = (needed, made) if what.back else (made, needed)
    return Ends(given=given, taken=taken, width=pieces.width, dtype=pieces.dtype)
