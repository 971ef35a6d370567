"""Drawn placements: every row comes where it belongs, and no step hangs.

``./scripts/fuzz.sh --placements N`` runs as many more as one likes.
"""

import pytest
from drawn_placements import DrawnEncoder, DrawnPlacement, drawn_placements
from parity.built_in import around
from parity.mutations import FAULTS
from placed_steps import play
from ranks import RankError, run_ranks

from loongplug.hetero.operations import Cargo

DRAWS = drawn_placements(200, seed=0)


@pytest.mark.parametrize("most", DRAWS)
def test_rows_come_where_they_belong(most: int) -> None:
    taken = run_ranks(play, most, draws=DRAWS[most], timeout=280.0)
    assert sum(taken) > len(DRAWS[most])


def with_a_fault(rank: int, *, fault: str, draws: list[DrawnPlacement]) -> int:
    FAULTS[fault].put_in(rank)
    return play(rank, draws=draws)


SPLIT = DrawnPlacement(encoders=(DrawnEncoder(),), tp=2, sequence_parallel=True, media="many")
SHARED = DrawnPlacement(encoders=(DrawnEncoder(dp=2),), micro_batch=2, media="many")


STAGES = DrawnPlacement(encoders=(DrawnEncoder(trains=(True, False)),), media="many")


def gradients_of_stages_turned_round(rank: int) -> int:
    around(
        "loongplug.hetero.wire:Wire.receive",
        lambda original, self, what, unit: original(self, what, unit).flip(0),
        where=lambda self, what, unit: what is Cargo.STATE_GRADIENTS,
    )
    return play(rank, draws=[STAGES])


def test_a_fault_between_stages_is_seen() -> None:
    with pytest.raises(RankError, match="a gradient is another unit's"):
        run_ranks(gradients_of_stages_turned_round, STAGES.ranks)


@pytest.mark.parametrize(
    ("draw", "fault", "said"),
    [
        (SHARED, "take_pieces_in_order_of_arrival", "features are another unit's"),
        (SPLIT, "place_gradients_mirrored", "a gradient is another unit's"),
    ],
)
def test_a_fault_is_seen(draw: DrawnPlacement, fault: str, said: str) -> None:
    with pytest.raises(RankError, match=rf"(?s){said}.*fuzz\.sh --placement '"):
        run_ranks(with_a_fault, draw.ranks, fault=fault, draws=[draw])
