"""Entries on ranks of their own: which layouts there are, and who sends to whom."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongplug.hetero.placement import Pair, Placement, all_apart, one_apart
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick

SIZES = st.integers(1, 3)
IMAGES = Entry(name="images", role=Role.ENCODER, into="text")


def images(decoder: Layout, vision: Layout) -> Placement:
    return all_apart(decoder, {"images": vision}, into="text")


def meetings(placement: Placement, *, micro_batch_size: int, cp: int) -> list[tuple[Pair, ...]]:
    pieces = placement.pieces("images", micro_batch_size=micro_batch_size)
    return [each.edge.meetings(each.replica, cp=cp) for each in pieces]


@st.composite
def worlds(draw: st.DrawFn) -> Placement:
    """A decoder and up to three encoders, whose ranks follow one another in any order."""
    names = ["text", *["images", "audio", "video"][: draw(st.integers(1, 3))]]
    layouts, first_rank = {}, 0
    for name in draw(st.permutations(names)):
        made = Layout(
            tp=draw(SIZES),
            pp=draw(SIZES),
            dp=draw(SIZES),
            cp=draw(st.integers(1, 2)) if name == "text" else 1,
            first_rank=first_rank,
        )
        layouts[name] = made
        first_rank = made.ranks.stop
    return all_apart(layouts.pop("text"), layouts, into="text")


@given(worlds())
def test_every_rank_has_one_entry(placement):
    ranks = [rank for entry in placement.entries for rank in entry.layout.ranks]
    assert sorted(ranks) == list(range(len(ranks)))
    assert [entry.into for entry in placement.entries[:-1]] == ["text"] * (
        len(placement.entries) - 1
    )
    assert placement.entries[-1].into is None
    for entry in placement.entries:
        assert placement.is_apart(entry.name) == (entry.into is not None)


@given(worlds(), st.integers(1, 4))
def test_an_edge_has_the_encoder_s_last_stage_and_the_decoder_s_first(placement, size):
    decoder = placement.entry("text").layout
    for entry in placement.entries[:-1]:
        encoder = entry.layout
        pieces = placement.pieces(entry.name, micro_batch_size=size)
        assert {each.decoder for each in pieces} == set(range(decoder.dp))
        for piece in pieces:
            made = [encoder.coordinates(rank) for rank in piece.ranks]
            assert [each.tp for each in made] == list(range(encoder.tp))
            assert {(each.pp, each.dp) for each in made} == {(encoder.pp - 1, piece.replica)}
            used = [decoder.coordinates(rank) for rank in piece.edge.consumers]
            assert [(each.cp, each.tp) for each in used] == [
                (cp, tp) for cp in range(decoder.cp) for tp in range(decoder.tp)
            ]
            assert {(each.pp, each.dp) for each in used} == {(0, piece.decoder)}


def test_replicas_and_their_ranks_take_turns_in_what_they_bring():
    """Rank e to rank e mod TP, counted from the group's first: 4 to 0, 5 to 1."""
    one = images(Layout(tp=2, pp=2), Layout(tp=4, first_rank=4))
    assert meetings(one, micro_batch_size=1, cp=1) == [((4, 0),)]
    assert meetings(one, micro_batch_size=1, cp=2) == [((4, 0), (4, 1))]
    two = images(Layout(tp=2, pp=2), Layout(tp=2, dp=2, first_rank=4))
    assert meetings(two, micro_batch_size=2, cp=1) == [((4, 0),), ((7, 1),)]


def test_each_sample_is_made_once_by_the_replica_whose_interval_it_is_in():
    """Asked sample by sample, in whole numbers: floor(a / b) <= s is the same as a < (s + 1) b.

    All that one replica makes of a microbatch is one piece.
    """
    for encoders, decoders, size in product(range(1, 13), range(1, 13), (1, 2, 3, 5, 12)):
        placement = images(Layout(dp=decoders), Layout(dp=encoders, first_rank=decoders))
        slot = placement.pieces("images", micro_batch_size=size)
        made = [(each.decoder, place) for each in slot for place in each.samples]
        assert made == list(product(range(decoders), range(size))), (encoders, decoders, size)
        assert len({(each.replica, each.decoder) for each in slot}) == len(slot)
        total = decoders * size
        for each in slot:
            assert len(each.samples)
            for place in each.samples:
                sample = each.decoder * size + place
                assert each.replica * total < (sample + 1) * encoders
                assert not (each.replica + 1) * total < (sample + 1) * encoders


@given(worlds())
def test_gradients_of_replicas_are_added_as_they_are(placement):
    """Each sample is encoded once: whatever the two numbers of replicas, nothing is scaled."""
    assert {placement.gradient_factor(entry.name) for entry in placement.entries} == {1.0}


@pytest.mark.parametrize(
    ("decoder", "encoders", "said"),
    [
        (
            Layout(tp=4),
            {"images": Layout(dp=4)},
            "'images' lies on ranks 0 to 3, which are those of 'text'; that is a colocated mode: "
            "leave rank_offset away",
        ),
        (
            Layout(tp=4),
            {"images": Layout(dp=4, first_rank=2)},
            "'images' on ranks 2 to 5 and 'text' on ranks 0 to 3 share ranks 2 to 3: change a "
            "rank_offset or a size",
        ),
        (
            Layout(tp=4),
            {"images": Layout(dp=4, first_rank=6)},
            "no module lies on ranks 4 to 5: give a module more replicas, or the modules behind a "
            "smaller rank_offset",
        ),
        (
            Layout(first_rank=1),
            {"images": Layout(first_rank=2), "audio": Layout(first_rank=4)},
            "no module lies on ranks 0, 3:",
        ),
    ],
    ids=["equal", "partly", "gap", "two gaps"],
)
def test_what_cannot_be_apart_is_one_sentence(decoder, encoders, said):
    with pytest.raises(ValueError, match=said) as caught:
        all_apart(decoder, encoders, into="text")
    assert str(caught.value).count(".") == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank_offset", [0, 1, 3])
def test_one_encoder_s_own_ranks_are_none_of_the_decoder_s(rank_offset: int) -> None:
    with pytest.raises(ValueError, match=r"'images'.* ranks 0 to 3"):
        one_apart(Layout(tp=4), entry=IMAGES, tp=2, dp=2, rank_offset=rank_offset)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=2, max_size=4))
def test_ranges_that_part_the_world_and_no_others(spans):
    decoder, *others = [Layout(dp=dp, first_rank=first_rank) for first_rank, dp in spans]
    encoders = {f"e{number}": each for number, each in enumerate(others)}
    ranks = sorted(rank for each in (decoder, *others) for rank in each.ranks)
    if ranks == list(range(len(ranks))):
        all_apart(decoder, encoders, into="text")
    else:
        with pytest.raises(ValueError, match="rank_offset"):
            all_apart(decoder, encoders, into="text")
