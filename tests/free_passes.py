"""Steps that stream in many passes: of a small model they would have one to a replica.

Passes of small encoders take longer than their rows do, so that plans join all that they can, and
nothing would be done between the decoder's passes.
"""


def free_passes(rank: int) -> None:
    """In a rank, before it trains: plans are made as if a pass took nothing but its rows."""
    from loongplug.training import streamed_costs

    streamed_costs.OF_A_LAYER = dict.fromkeys(streamed_costs.OF_A_LAYER, 0)
