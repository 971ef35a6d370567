"""Who encodes which samples, where encoder and decoder have other numbers of replicas."""

from itertools import product
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed import ENCODER

from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.placement import ApartPiece, one_apart
from loongplug.parallel.layout import Layout

pytestmark = pytest.mark.quick
ALL = list(product(range(1, 13), range(1, 13), (1, 2, 3, 5, 12)))


def overlaps(*, encoders: int, decoders: int, micro_batch_size: int) -> tuple[ApartPiece, ...]:
    """Of replicas of one rank each."""
    placement = one_apart(
        Layout(dp=decoders), entry=ENCODER, tp=1, dp=encoders, rank_offset=decoders
    )
    return placement.pieces(ENCODER.name, micro_batch_size=micro_batch_size)


def blocks(slot: tuple[ApartPiece, ...]) -> int:
    """Sets of replicas that have to do with one another, and with no others."""
    joined: list[set[tuple[str, int]]] = []
    for each in slot:
        pair = {("encoder", each.replica), ("decoder", each.decoder)}
        for block in [block for block in joined if block & pair]:
            joined.remove(block)
            pair |= block
        joined.append(pair)
    return len(joined)


def test_every_sample_is_made_once_and_in_order():
    for encoders, decoders, size in ALL:
        slot = overlaps(encoders=encoders, decoders=decoders, micro_batch_size=size)
        made = [(each.decoder, place) for each in slot for place in each.samples]
        assert made == list(product(range(decoders), range(size))), (encoders, decoders, size)
        assert all(each.samples.step == 1 and len(each.samples) for each in slot)


def test_each_sample_s_encoder_is_the_one_whose_interval_it_is_in():
    """Asked sample by sample, in whole numbers: floor(a / b) <= s is the same as a < (s + 1) b."""
    for encoders, decoders, size in ALL:
        total = decoders * size
        for each in overlaps(encoders=encoders, decoders=decoders, micro_batch_size=size):
            for place in each.samples:
                sample = each.decoder * size + place
                assert each.replica * total < (sample + 1) * encoders
                assert not (each.replica + 1) * total < (sample + 1) * encoders


def test_as_few_pairs_as_there_can_be_and_independent_blocks():
    """Two ladders of bounds have gcd rungs in common, where blocks part."""
    for encoders, decoders, size in ALL:
        slot = overlaps(encoders=encoders, decoders=decoders, micro_batch_size=size)
        pairs = {(each.replica, each.decoder) for each in slot}
        assert len(pairs) == len(slot)
        common = gcd(encoders, decoders)
        if decoders * size % encoders == 0:
            assert len(slot) == encoders + decoders - common
            assert blocks(slot) == common
        else:
            assert len(slot) <= encoders + decoders - common
            assert blocks(slot) >= common


def test_encoder_replicas_have_as_many_samples_as_one_another_or_one_more():
    for encoders, decoders, size in ALL:
        slot = overlaps(encoders=encoders, decoders=decoders, micro_batch_size=size)
        counts = [
            sum(len(each.samples) for each in slot if each.replica == number)
            for number in range(encoders)
        ]
        assert sum(counts) == decoders * size
        assert max(counts) - min(counts) <= 1
        assert (0 in counts) == (encoders > decoders * size)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 16))
def test_large_worlds(encoders, decoders, size):
    slot = overlaps(encoders=encoders, decoders=decoders, micro_batch_size=size)
    assert sum(len(each.samples) for each in slot) == decoders * size
    assert [each.replica for each in slot] == sorted(each.replica for each in slot)
    for decoder in {0, decoders // 2, decoders - 1}:
        places = [place for each in slot if each.decoder == decoder for place in each.samples]
        assert places == list(range(size))


@pytest.mark.parametrize(
    ("encoders", "decoders", "size", "expected"),
    [
        (3, 2, 3, [(0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 0, 1), (2, 1, 1, 3)]),
        (2, 3, 2, [(0, 0, 0, 2), (0, 1, 0, 1), (1, 1, 1, 2), (1, 2, 0, 2)]),
        (4, 1, 4, [(0, 0, 0, 1), (1, 0, 1, 2), (2, 0, 2, 3), (3, 0, 3, 4)]),
        (4, 1, 1, [(3, 0, 0, 1)]),
        (3, 1, 2, [(1, 0, 0, 1), (2, 0, 1, 2)]),
        (1, 4, 1, [(0, 0, 0, 1), (0, 1, 0, 1), (0, 2, 0, 1), (0, 3, 0, 1)]),
    ],
)
def test_by_hand(encoders, decoders, size, expected):
    slot = overlaps(encoders=encoders, decoders=decoders, micro_batch_size=size)
    found = [(each.replica, each.decoder, each.samples.start, each.samples.stop) for each in slot]
    assert found == expected


def test_one_replica_s_are_in_order():
    slot = overlaps(encoders=2, decoders=3, micro_batch_size=2)
    assert made_by(3, Layout(dp=2, first_rank=3), slot) == slot[:2]
    assert made_by(4, Layout(dp=2, first_rank=3), slot) == slot[2:]
    assert made_by(2, Layout(dp=2, first_rank=3), slot) == ()
    few = overlaps(encoders=4, decoders=1, micro_batch_size=1)
    assert made_by(1, Layout(dp=4, first_rank=1), few) == ()


def made_by(rank: int, layout: Layout, pieces: tuple[ApartPiece, ...]) -> tuple[ApartPiece, ...]:
    place = EncoderPlace(state=None, replica_group=None, layout=layout, pieces={True: pieces})
    return place.made_by(rank, training=True)
