"""Encoders on ranks of their own in an estimate: which rank is seen."""

from itertools import chain

import pytest

from loongplug.estimate.ranks import as_rank
from loongplug.estimate.run_of_flags import own_ranks_of, parsed_for, step_of_data

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("sizes", "replica", "decoders"),
    [
        ("rank_offset=2", 0, [(0, range(2)), (1, range(2))]),
        ("rank_offset=2 data_parallel_size=3", 2, [(1, range(2))]),
        ("rank_offset=1 data_parallel_size=3", 1, [(0, range(1))]),
    ],
)
def test_an_encoder_is_seen_at_the_replica_with_the_most_samples(flags, sizes, replica, decoders):
    """Its pieces are those of the run, and their media those of the decoder's microbatches."""
    given = [f"model.image_encoder.{each}" for each in sizes.split()]
    offset = int(sizes.split()[0][-1])
    ranks = offset + int(sizes.split()[-1][-1] if "data" in sizes else 1)
    parsed = parsed_for([*flags, *given], ranks=ranks)
    (own,) = own_ranks_of(parsed.args, parsed.model)
    assert (own.replica, own.rank(0)) == (replica, offset + replica)
    assert [(each.decoder, each.samples) for each in own.made] == decoders
    with as_rank(parsed, own.rank(0)) as here:
        place = here.engine.encoders["image_encoder"].place
        pieces = [
            (each.decoder, each.samples) for each in place.made_by(own.rank(0), training=True)
        ]
        assert pieces == decoders
        assert not here.engine.decodes
        assert not hasattr(here.chunks[0], "text_decoder")
    encoder, step_of = parsed.model.image_encoder, step_of_data(parsed.args, parsed.model)
    units, whole = (
        [each.units["image_encoder"] for each in microbatches]
        for microbatches in (
            step_of(own.parts(packed=False)),
            chain(*zip(*(step_of({each: None}) for each, _ in decoders), strict=True)),
        )
    )
    for piece, unit, (_, samples) in zip(units, whole, decoders * 99, strict=False):
        assert piece.tokens == sum(map(encoder.tokens, piece.grids)) > 0
        if samples == range(2):
            assert (piece.grids, piece.tokens) == (unit.grids, unit.tokens)
        else:
            assert piece.grids == unit.grids[: len(piece.grids)] != unit.grids
    assert len(units) == len(whole)
