"""What several units are as one pass through an encoder."""

import pytest
import torch

from loongplug.data.microbatch import MediaInput
from loongplug.hetero.encoder_of_step import put_together

pytestmark = pytest.mark.quick

SOUNDS = 32  # values of a row


def media(*lengths: int) -> MediaInput:
    grids = torch.tensor([(1, 1, each) for each in lengths], dtype=torch.int64).reshape(-1, 3)
    return MediaInput(rows=torch.randn(sum(lengths), SOUNDS), grids=grids)


def test_media_of_units_follow_each_other() -> None:
    one, other = media(3, 2), media(4)
    found = put_together([one, other])
    assert torch.equal(found.rows, torch.cat([one.rows, other.rows]))
    assert found.grids.tolist() == [[1, 1, 3], [1, 1, 2], [1, 1, 4]]


def test_units_without_media_add_nothing() -> None:
    none, sounds = media(), media(3)
    found = put_together([none, sounds, none])
    assert torch.equal(found.rows, sounds.rows)
    assert found.grids.tolist() == [[1, 1, 3]]
    assert put_together([none, none]).rows.shape == (0, SOUNDS)
