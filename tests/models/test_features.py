"""Where features go in the text."""

import numpy as np
import pytest
import torch

from loongplug.context.row_parts import BALANCES, Balance, RowParts
from loongplug.context.token_split import ContextShard
from loongplug.models.features import Features, TokenPlaces, place, share_of, token_places

pytestmark = pytest.mark.quick


def located(*rows: list[int], length: int, **part: int) -> TokenPlaces:
    """Of the tokens that lie there in each row."""
    places = [np.array(row, dtype=np.int64) for row in rows]
    return token_places(places, held=ContextShard.whole(length), device=torch.device("cpu"), **part)


def test_features_land_sample_by_sample():
    places = located([1, 2], [0, 3], length=4)
    features = torch.arange(4.0)[:, None] + 1  # [tokens, hidden = 1]
    target = place(torch.zeros(4, 2, 1), features, places=places)  # [s, b, 1]
    assert target[:, :, 0].T.tolist() == [[0, 1, 2, 0], [3, 0, 0, 4]]


def test_parts_of_a_row_take_the_features_of_their_own_tokens() -> None:
    """Six tokens of a rank that has the row's first and last, split once more over two ranks."""
    held = ContextShard(np.array([0, 9]), np.array([3, 12]))
    places = [np.array([1, 2, 3, 9, 11]), np.array([0, 8, 10])]
    first, second = (
        token_places(places, held=held, device=torch.device("cpu"), part=part, parts=2)
        for part in range(2)
    )
    assert first.rows.tolist() == [0, 1, 5]
    assert (first.sample.tolist(), first.position.tolist()) == ([0, 0, 1], [1, 2, 0])
    assert second.rows.tolist() == [3, 4, 7]
    assert (second.sample.tolist(), second.position.tolist()) == ([0, 0, 1], [0, 2, 1])
    assert first.count == second.count == 8


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(
    "image", [range(24), range(3, 20), range(2), range(0)], ids=["all", "most", "two", "none"]
)
@pytest.mark.parametrize("parts", [1, 2])
def test_an_image_over_all_parts_or_in_few_of_them_is_placed_once(
    image: range, balance: Balance, parts: int
) -> None:
    """A pack of a sample with the image, one of a token, and padding, on three ranks."""
    row = torch.zeros(24, 1, 1)
    features = torch.arange(1.0, len(image) + 1)[:, None]
    for rank in range(3):
        own = RowParts(cp=3, rank=rank, balance=balance).of(24, segments=(20, 1))
        for part, held in enumerate(np.split(own.part.places, parts)):
            places = token_places(
                [np.array(image, dtype=np.int64)],
                held=own.part,
                device=torch.device("cpu"),
                part=part,
                parts=parts,
            )
            mine = torch.zeros(len(held), 1, 1)
            row[held] += place(mine, features[places.rows], places=places)
    assert row.flatten()[list(image)].tolist() == features.flatten().tolist()
    assert row.count_nonzero() == len(image)


def test_a_token_count_that_does_not_fit_is_named():
    places, features = located([1, 2], length=3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="has 2 tokens for media, which give 3 features"):
        place(torch.zeros(3, 1, 4), features, places=places)
    with pytest.raises(ValueError, match="has 2 tokens for media, which give 3 features"):
        share_of(Features(embeddings=features, deepstack=()), places=places, group=None)
