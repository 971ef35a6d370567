"""States from stage to stage of an encoder and gradients back: each row once, in its unit."""

import pytest
import torch
from delivered import delivered

from loongplug.hetero.carrier import StageSpec, stage_links, state_moves
from loongplug.hetero.communicators import stage_pairs
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.operations import Cargo
from loongplug.hetero.placement import one_apart
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout

ROWS = [3, 0, 5, 1, 4]


@pytest.mark.quick
@pytest.mark.parametrize("what", [Cargo.STATES, Cargo.STATE_GRADIENTS])
def test_both_ends_list_the_same_messages(what: Cargo) -> None:
    spec = StageSpec(rows=tuple(ROWS), microbatches=(0, 0, 1, 1, 2), dtype=torch.float32)
    layout = Layout(pp=3)
    around = {rank: stage_links(layout, rank, widths=[10, 11]) for rank in layout.ranks}
    moves = {rank: state_moves(what, spec, links, rank=rank) for rank, links in around.items()}
    found = delivered(moves, lambda rank, unit: [(rank, row) for row in range(ROWS[unit])])
    from_where = 1 if what.back else -1
    assert found == {
        (rank, unit): [(rank + from_where, row) for row in range(rows)]
        for rank in around
        if rank + from_where in around
        for unit, rows in enumerate(ROWS)
        if rows
    }
    assert [moves[1].width, moves[1].microbatches[3]] == [11 if what.back else 10, 1]


@pytest.mark.quick
def test_ranks_hand_on_to_those_of_the_next_stage() -> None:
    layout = Layout(tp=2, pp=3, first_rank=4)
    assert stage_pairs(layout) == [(4, 6), (6, 8), (5, 7), (7, 9)]
    for rank in layout.ranks:
        links = stage_links(layout, rank, widths=[1, 2])
        assert {(each.source, each.target) for each in links} == {
            pair for pair in stage_pairs(layout) if rank in pair
        }
    assert stage_links(layout, 3, widths=[1, 2]) == ()
    assert stage_pairs(Layout(tp=2, dp=2, first_rank=1)) == []


@pytest.mark.quick
def test_all_stages_of_a_replica_have_the_same_pieces_and_the_first_is_given_media() -> None:
    entry = Entry(name="eyes", role=Role.ENCODER, into="text")
    sizes = {"tp": 2, "pp": 2, "dp": 3, "rank_offset": 2}
    placement = one_apart(Layout(dp=2), entry=entry, **sizes)
    pieces = placement.pieces("eyes", micro_batch_size=3)
    layout = placement.entry("eyes").layout
    place = EncoderPlace(state=None, replica_group=None, layout=layout, pieces={True: pieces})
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        mine = tuple(each for each in pieces if each.replica == at.dp)
        assert place.made_by(rank, training=True) == mine
        assert place.given_media(rank) == (2 + 2 * at.dp, 3 + 2 * at.dp)
    assert {rank for each in pieces for rank in each.ranks} == set(range(8, 14))
    assert place.made_by(0, training=True) == ()
