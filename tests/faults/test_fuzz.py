"""Drawn training runs with faults in them: right, or one error on all ranks; never a hang.

``./scripts/fuzz.sh`` runs as many more as one likes.
"""

import os

import pytest
from drawn_options import MODELS, Layout, own_layouts_of
from draws import GLOBAL_BATCH, Draw, Fault, drawn
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from world import World

DRAWS = int(os.environ.get("FUZZ_DRAWS", "1"))

PP2, PP4 = Layout(ranks=2, pp=2), Layout(ranks=4, pp=4)


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


@example(Draw(layout=PP2, mode="full", trains="decoder", resume=PP2))
@example(Draw(layout=PP4, mode="full", fault=FULL_DISK))
@example(Draw(layout=PP2, fault=OVERWRITTEN, resume=PP2))
@example(Draw(layout=PP2, fault=OTHER_RATE, resume=PP2))
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


@pytest.mark.parametrize("model", MODELS)
def test_encoders_on_ranks_of_their_own_leave_the_decoder_whole_replicas(model):
    for layout in own_layouts_of(model, large=True):
        replicas, left = divmod(layout.decoder_ranks, layout.tp * layout.cp * layout.pp)
        assert (left, GLOBAL_BATCH % (2 * replicas)) == (0, 0), layout
        assert layout.decoder_ranks % (layout.pp * layout.ep) == 0, layout
        assert len(layout.encoders) == 1 or model == "two encoders"


@given(draws())
@settings(max_examples=300, deadline=None, database=None)
def test_a_draw_is_read_as_it_was_written(draw):
    assert Draw.from_json(draw.to_json()) == draw
