"""Decoder layouts, encoder sizes and ranks for property tests of who encodes what."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from loongplug.hetero.placement import Edge, Placement, all_ranks_dp, first_stage_dp, first_stage_tp
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout, encoder_sizes

ENCODER = Entry(name="image_encoder", role=Role.ENCODER, into="text_decoder")
PLACES = (first_stage_tp, first_stage_dp, all_ranks_dp)
SIZES = st.sampled_from([1, 2, 3, 4])
CP = st.sampled_from([1, 1, 2, 3])


def part_of(edge: Edge, rank: int, *, parts: int) -> int:
    """The part of the sequence that a consumer has: neighbours share one."""
    return edge.consumers.index(rank) * parts // len(edge.consumers)


@st.composite
def decoders(draw: st.DrawFn) -> tuple[Layout, int]:
    """A decoder's layout, and a tensor parallel size that divides its own."""
    tp = draw(st.sampled_from([1, 2, 4, 6]))
    decoder = Layout(tp=tp, cp=draw(CP), pp=draw(SIZES), dp=draw(SIZES))
    return decoder, draw(st.sampled_from([size for size in range(1, tp + 1) if tp % size == 0]))


@st.composite
def placements(
    draw: st.DrawFn, places: Sequence[Callable[..., Placement]] = PLACES
) -> tuple[Placement, Layout, int]:
    """A placement, with its decoder's layout and one of its ranks.

    An encoder that lies on all stages may be sharded over several of them.
    """
    decoder, tp = draw(decoders())
    rank = draw(st.sampled_from(decoder.ranks))
    place = draw(st.sampled_from(places))
    if place is all_ranks_dp:
        tp = draw(st.sampled_from(encoder_sizes(decoder, on_first_stage=False)))
    return place(decoder, entry=ENCODER, tp=tp), decoder, rank
