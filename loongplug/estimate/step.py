"""One step of a rank, followed pass by pass."""

from collections.abc import Callable

from loongplug.estimate.encoder_side import Side
from loongplug.estimate.ledger import Ledger
from loongplug.estimate.schedule import Pipeline, passes
from loongplug.estimate.trace import DECODER, ENCODER, Cost

CostOf = Callable[[int, int], Cost]  # of a chunk and a microbatch


def follow(
    ledger: Ledger, pipeline: Pipeline, side: Side, *, microbatches: int, cost_of: CostOf
) -> None:
    """Enter into ``ledger`` what a step makes and frees."""
    side.begin(ledger)
    for each in passes(pipeline, microbatches):
        cost = cost_of(each.chunk, each.microbatch)
        if each.forward:
            if each.chunk == 0:
                side.forward(ledger, each.microbatch)
            ledger.add(ENCODER, cost.encoder)
            ledger.add(DECODER, cost.decoder)
            ledger.work("forward", cost.forward - cost.encoder - cost.decoder)
            continue
        ledger.work("backward", cost.backward)
        ledger.take(ENCODER, cost.encoder)
        ledger.take(DECODER, cost.decoder)
        if each.chunk == 0:
            side.backward(ledger, each.microbatch)
    side.end(ledger)
