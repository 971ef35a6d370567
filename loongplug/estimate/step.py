"""One step of a rank, followed piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loongplug.estimate.encoder_side import EncoderSide
from loongplug.estimate.ledger import PIPELINE, Ledger
from loongplug.estimate.schedule import Piece, Pipeline, pieces
from loongplug.estimate.trace import DECODER, ENCODER, Cost
from loongplug.hetero.operations import BEGIN, END, backward, forward, gradient

CostOf = Callable[[int, int], Cost]  # of a chunk and a microbatch


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a piece of work leaves or frees, and the most that it holds besides what was there."""

    encoder: int
    decoder: int
    most: int


ChangeOf = Callable[[int, Piece], Change]  # of a step's piece, by its number in the step


def one_by_one(cost_of: CostOf) -> ChangeOf:
    """Where a forward and a backward have nothing to do with each other."""

    def change_of(number: int, piece: Piece) -> Change:
        if piece.forward is not None:
            cost = cost_of(piece.forward.chunk, piece.forward.microbatch)
            return Change(encoder=cost.encoder, decoder=cost.decoder, most=cost.forward)
        assert piece.backward is not None
        cost = cost_of(piece.backward.chunk, piece.backward.microbatch)
        return Change(encoder=-cost.encoder, decoder=-cost.decoder, most=cost.backward)

    return change_of


def pipeline_buffers(costs: Sequence[Cost]) -> int:
    """What Megatron's schedules hold between stages besides what a pass takes and leaves.

    1F1B: the gradient that was sent last. Interleaved, with ``costs`` of several chunks: what has
    come for the next forward and the next backward, and what was sent by the last ones.
    """
    if len(costs) == 1:
        return costs[0].received
    return 2 * max(each.received + each.sent for each in costs)


def follow(
    ledger: Ledger,
    pipeline: Pipeline,
    side: EncoderSide,
    *,
    microbatches: int,
    change_of: ChangeOf,
    buffers: int,
) -> None:
    """Enter into ``ledger`` what a step makes and frees; ``buffers`` are there all along."""
    side.at(ledger, BEGIN)
    ledger.add(PIPELINE, buffers)
    for number, piece in enumerate(pieces(pipeline, microbatches)):
        change = change_of(number, piece)
        if piece.forward is not None and piece.forward.chunk == 0:
            side.at(ledger, forward(piece.forward.microbatch))
        if piece.backward is not None and piece.backward.chunk == 0:
            side.at(ledger, backward(piece.backward.microbatch))
        _work(ledger, piece.name, change)
        if piece.backward is not None and piece.backward.chunk == 0:
            side.at(ledger, gradient(piece.backward.microbatch))
    ledger.clear(PIPELINE)
    side.at(ledger, END)


def _work(ledger: Ledger, name: str, change: Change) -> None:
    """What stays is entered before the work, what goes is there until it is done."""
    changes = {ENCODER: change.encoder, DECODER: change.decoder}
    more = {part: max(0, nbytes) for part, nbytes in changes.items()}
    for part, nbytes in more.items():
        ledger.add(part, nbytes)
    ledger.work(name, change.most - sum(more.values()))
    for part, nbytes in changes.items():
        ledger.take(part, more[part] - nbytes)
