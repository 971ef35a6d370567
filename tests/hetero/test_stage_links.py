"""States from stage to stage of an encoder and gradients back: each row once, in its unit."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loongplug.hetero.communicators import stage_pairs
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.placement import one_apart
from loongplug.hetero.stage_links import StageLink, StageLinks, StageUnit
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout

ROWS = [3, 0, 5, 1, 4]
WIDTHS = (2, 4)  # of what the first stage hands on, and the second
STEPS = 2


def made(step: int, boundary: int, unit: int) -> torch.Tensor:
    """What goes over a boundary, [rows, width]."""
    values = torch.arange(ROWS[unit] * WIDTHS[boundary], dtype=torch.float32)
    return values.view(ROWS[unit], WIDTHS[boundary]) + 100.0 * (unit + 10 * (boundary + step))


def go_through(rank: int, *, comes_back: bool) -> list[tuple[int, int]]:
    """Three stages of one rank each; messages and bytes that this one sent, by the target."""
    groups = [[dist.new_group(ranks) for _ in range(2)] for ranks in ([0, 1], [1, 2])]

    def link(boundary: int, peer: int) -> StageLink:
        there, back = groups[boundary]
        return StageLink(peer=peer, there=there, back=back, width=WIDTHS[boundary])

    before = link(rank - 1, rank - 1) if rank else None
    behind = link(rank, rank + 1) if rank < 2 else None
    warmup = 3 - rank
    links = StageLinks(
        before=before, behind=behind, window=2, in_flight=warmup + 1, device=torch.device("cpu")
    )
    sent = [(0, 0)] * 3
    isend = dist.isend

    def counting(rows: torch.Tensor, *, dst: int, **to: object) -> object:
        messages, size = sent[dst]
        sent[dst] = (messages + 1, size + rows.nbytes)
        time.sleep(0.02 * (rank == 0))  # the others have posted and sent long before
        return isend(rows, dst=dst, **to)

    dist.isend = counting
    for step in range(STEPS):
        units = [StageUnit(rows=rows, microbatch=number) for number, rows in enumerate(ROWS)]
        links.begin(units, dtype=torch.float32, comes_back=comes_back)
        for number in range(len(ROWS) + warmup):
            if number < len(ROWS):
                if before is not None:
                    assert torch.equal(links.take(number), made(step, rank - 1, number))
                if behind is not None:
                    links.hand_on(number, made(step, rank, number))
            if comes_back and (old := number - warmup) >= 0:
                if behind is not None:
                    assert torch.equal(links.take_back(old), -made(step, rank, old))
                if before is not None:
                    links.give_back(old, -made(step, rank - 1, old))
        links.drain()
    return sent


@pytest.mark.parametrize("comes_back", [True, False])
def test_every_row_goes_over_each_boundary_once(comes_back: bool) -> None:
    """And nothing else: so many messages, and as many bytes as the rows have."""
    messages, nothing = STEPS * sum(rows > 0 for rows in ROWS), (0, 0)
    first, second = (
        (messages, STEPS * sum(ROWS) * width * torch.float32.itemsize) for width in WIDTHS
    )
    assert run_ranks(go_through, 3, comes_back=comes_back) == [
        [nothing, first, nothing],
        [first if comes_back else nothing, nothing, second],
        [nothing, second if comes_back else nothing, nothing],
    ]


@pytest.mark.quick
def test_ranks_hand_on_to_those_of_the_next_stage() -> None:
    pairs = [[(4, 6), (5, 7)], [(6, 8), (7, 9)]]
    assert stage_pairs(Layout(tp=2, pp=3, first_rank=4)) == pairs
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
        assert [each.edge.encoder for each in place.made_by(rank, training=True)] == [at.dp] * (
            1 + (at.dp == 1)
        )
        assert place.given_media(rank) == (2 + 2 * at.dp, 3 + 2 * at.dp)
    assert {rank for each in pieces for rank in each.edge.encoder_ranks} == set(range(8, 14))
    assert place.made_by(0, training=True) == ()
