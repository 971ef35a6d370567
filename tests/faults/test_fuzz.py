"""Drawn training runs with faults in them: right, or one error on all ranks; never a hang.

``./scripts/fuzz.sh`` runs as many more as one likes.
"""

import os
from dataclasses import replace

import pytest
from draws import Draw, Fault, drawn
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from parity.cells import DENSE, Cell
from parity.option_flags import FULL
from world import World

DRAWS = int(os.environ.get("FUZZ_DRAWS", "1"))

PP2 = Cell(model=DENSE, pp=2)
PP4_FULL = Cell(model=DENSE, pp=4, mode=FULL)
PP2_DECODER = replace(PP2, trained="the decoder")


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """As ``drawn`` makes them."""
    return drawn(lambda options: draw(st.sampled_from(options)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("fuzz"))


# What an earlier version did wrong comes first: a checkpoint in which nothing of the encoder's part
# is trained, and a file that cannot be flushed on a rank other than the first.
# Then one of each start that has to be refused: damage that a read finds alone, another rate.
OVERWRITTEN = Fault(kind="damaged checkpoint", place="tensors", way="overwritten", step=4)
OTHER_RATE = Fault(kind="other start", ranks=(1,), place="a flag", way="--lr")
FULL_DISK = Fault(kind="full disk", ranks=(2,), way="flush", step=4)


@example(Draw(cell=replace(PP2_DECODER, mode=FULL), resume=PP2_DECODER))
@example(Draw(cell=PP4_FULL, fault=FULL_DISK))
@example(Draw(cell=PP2, fault=OVERWRITTEN, resume=PP2))
@example(Draw(cell=PP2, fault=OTHER_RATE, resume=PP2))
@given(draws())
@settings(
    max_examples=DRAWS,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_is_right_or_all_ranks_end_with_one_error(world, draw):
    world.check(draw)
