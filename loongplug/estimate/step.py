"""One step of a rank, followed pass by pass."""

from collections.abc import Callable, Sequence

from loongplug.estimate.encoder_side import Side
from loongplug.estimate.ledger import PIPELINE, Ledger
from loongplug.estimate.schedule import Pipeline, passes
from loongplug.estimate.trace import DECODER, ENCODER, Cost

CostOf = Callable[[int, int], Cost]  # of a chunk and a microbatch


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
    side: Side,
    *,
    microbatches: int,
    cost_of: CostOf,
    buffers: int,
) -> None:
    """Enter into ``ledger`` what a step makes and frees; ``buffers`` are there all along."""
    side.begin(ledger)
    ledger.add(PIPELINE, buffers)
    for each in passes(pipeline, microbatches):
        cost = cost_of(each.chunk, each.microbatch)
        if each.forward:
            if each.chunk == 0:
                side.forward(ledger, each.microbatch)
            ledger.add(ENCODER, cost.encoder)
            ledger.add(DECODER, cost.decoder)
            ledger.work("forward", cost.forward - cost.encoder - cost.decoder)
            continue
        if each.chunk == 0:
            side.before_backward(ledger, each.microbatch)
        ledger.work("backward", cost.backward)
        ledger.take(ENCODER, cost.encoder)
        ledger.take(DECODER, cost.decoder)
        if each.chunk == 0:
            side.backward(ledger, each.microbatch)
    ledger.clear(PIPELINE)
    side.end(ledger)
