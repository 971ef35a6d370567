"""Where vision features go in the text."""

import pytest
import torch

from loongplug.models.features import VisionFeatures, place, visual_positions

pytestmark = pytest.mark.quick

IMAGE, VIDEO = 8, 9


def test_features_land_sample_by_sample():
    input_ids = torch.tensor([[1, IMAGE, IMAGE, 2], [VIDEO, 1, 2, IMAGE]])  # [b, s]
    sample, position = visual_positions(input_ids, (IMAGE, VIDEO))
    features = torch.arange(4.0)[:, None] + 1  # [tokens, hidden = 1]
    target = place(torch.zeros(4, 2, 1), features, sample=sample, position=position)  # [s, b, 1]
    assert target[:, :, 0].T.tolist() == [[0, 1, 2, 0], [3, 0, 0, 4]]


def test_gradients_return_to_the_features_and_leave_the_text():
    input_ids = torch.tensor([[1, IMAGE, 2]])
    sample, position = visual_positions(input_ids, (IMAGE,))
    features = torch.zeros(1, 2, requires_grad=True)
    text = torch.zeros(3, 1, 2, requires_grad=True)
    weight = torch.arange(6.0).view(3, 1, 2)
    (place(text, features, sample=sample, position=position) * weight).sum().backward()
    assert features.grad.tolist() == [[2, 3]]
    assert text.grad[:, 0].tolist() == [[0, 1], [0, 0], [4, 5]]


def test_a_token_count_that_does_not_fit_is_named():
    input_ids = torch.tensor([[1, IMAGE, IMAGE]])
    sample, position = visual_positions(input_ids, (IMAGE,))
    with pytest.raises(ValueError, match="has 2 visual tokens, its images give 3"):
        place(torch.zeros(3, 1, 4), torch.zeros(3, 4), sample=sample, position=position)


def test_none_of_them_keeps_the_graph():
    weight = torch.ones(3, 2, requires_grad=True)
    features = VisionFeatures(embeddings=weight * 2, deepstack=(weight * 3,)).none_of_them()
    assert features.embeddings.shape == features.deepstack[0].shape == (0, 2)
    (features.embeddings.sum() + features.deepstack[0].sum()).backward()
    assert weight.grad.tolist() == torch.zeros(3, 2).tolist()
