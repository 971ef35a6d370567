"""What several units are as one pass through an encoder."""

import pytest
import torch

from loongplug.data.microbatch import MediaInput
from loongplug.hetero.encoder_of_step import put_together

pytestmark = pytest.mark.quick

SOUNDS, PATCHES = 32, 1536  # values of a row


def media(*lengths: int, width: int = SOUNDS) -> MediaInput:
    grids = torch.tensor([(1, 1, each) for each in lengths], dtype=torch.int64).reshape(-1, 3)
    return MediaInput(rows=torch.randn(sum(lengths), width), grids=grids)


def test_media_of_units_follow_each_other() -> None:
    one, other = media(3, 2), media(4)
    found = put_together([one, other])
    assert torch.equal(found.rows, torch.cat([one.rows, other.rows]))
    assert found.grids.tolist() == [[1, 1, 3], [1, 1, 2], [1, 1, 4]]


def test_units_without_media_may_be_of_any_width() -> None:
    """A microbatch without a sound, before an encoder of sounds: its rows are no image's."""
    none, sounds = media(width=PATCHES), media(3)
    assert put_together([none, sounds, none]) is sounds
    assert put_together([none, none]) is none
    more = put_together([sounds, none, media(2)])
    assert (more.rows.shape, len(more.grids)) == ((5, SOUNDS), 2)
