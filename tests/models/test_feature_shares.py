"""Features in a sequence that is split over tensor parallel ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from loongplug.context.token_split import ContextShard
from loongplug.models.features import Features, TokenPlaces, share_of, token_places

TOKENS, HIDDEN = 6, 3
# Two rows of three parts of two tokens: uneven parts, and none at all in the last one's.
PLACES = np.array([0, 1, 2]), np.array([1, 2, 3])
PARTS = torch.tensor([0, 0, 1, 0, 1, 1])  # of each token


def features(values: torch.Tensor) -> Features:
    return Features(embeddings=values, deepstack=(values * 2,))


def located(*, part: int, tokens: int) -> TokenPlaces:
    places = PLACES if tokens else ()
    return token_places(
        places, held=ContextShard.whole(6), device=torch.device("cpu"), part=part, parts=3
    )


def take(rank: int, *, tokens: int) -> None:
    """The gradient of features is the sum over the ranks of what each does with its rows."""
    group = dist.group.WORLD
    assert group is not None
    values = torch.arange(tokens * HIDDEN, dtype=torch.float64).reshape(tokens, HIDDEN)
    values.requires_grad_()
    mine = PARTS[:tokens] == rank
    places = located(part=rank, tokens=tokens)
    share = share_of(features(values), places=places, group=group)
    assert torch.equal(share.embeddings, values[mine])
    assert torch.equal(share.deepstack[0], values[mine] * 2)
    # Each row counts by its own weight, on whichever rank it lies.
    weights = torch.arange(1.0, tokens + 1, dtype=torch.float64).unsqueeze(1)
    loss = (share.embeddings * weights[mine]).sum() + (share.deepstack[0] * 10).sum()
    loss.backward()
    assert values.grad is not None
    assert torch.equal(values.grad, (weights + 20).expand(tokens, HIDDEN))


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_each_rank_takes_its_rows_and_all_get_the_whole_gradient(tokens):
    run_ranks(take, 3, tokens=tokens)


@pytest.mark.quick
def test_a_wrong_number_of_features_is_told():
    places = located(part=0, tokens=TOKENS)
    with pytest.raises(ValueError, match=r"has 6 tokens for media, which give 5 features"):
        share_of(features(torch.zeros(TOKENS - 1, HIDDEN)), places=places, group=None)
