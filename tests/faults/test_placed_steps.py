"""Drawn placements: every row comes where it belongs, no step hangs, and both would be seen.

``./scripts/fuzz.sh --placements N`` runs as many more as one likes.
"""

from dataclasses import replace
from typing import Any

import placed_steps
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


PIPELINE = DrawnPlacement(encoders=(DrawnEncoder(),), pp=2)


def two_forwards_too_few(rank: int) -> int:
    def few(original: Any, *arguments: Any, **of_step: Any) -> Any:
        step = original(*arguments, **of_step)
        ahead = (max(number, count - 2) for number, count in enumerate(step.forwards, start=1))
        return replace(step, forwards=tuple(ahead))

    around("loongplug.hetero.encoder_place:EncoderPlace.step", few)
    placed_steps.SECONDS = 3.0
    return play(rank, draws=[PIPELINE])


def test_a_step_without_end_is_seen() -> None:
    """An encoder waits for a gradient that needs its next features."""
    with pytest.raises(RankError, match=r"(?s)[Tt]imed out.*fuzz\.sh --placement '"):
        run_ranks(two_forwards_too_few, PIPELINE.ranks)
