"""Features of two encoders in one sequence: each in its own places, in all streams."""

import numpy as np
import pytest
import torch
from hf_models import Layout, build_chunks, decoder_config
from ranks import model_parallel, run_ranks
from tiny_families import QWEN3_VL

from loongplug.models.features import Features, PlacedFeatures

pytestmark = pytest.mark.quick

PLACES = np.array([1, 2, 9]), np.array([4, 5])  # of each encoder's tokens


def embedded(rank: int, *, taps: int) -> None:
    """One encoder has deepstack features for three layers, the other for so many."""
    with model_parallel():
        (model,) = build_chunks(QWEN3_VL, decoder_config(QWEN3_VL, Layout()), Layout())
        decoder, ids = model.text_decoder, torch.arange(12)[None]
        placed = []
        for number, (places, deepstack) in enumerate(zip(PLACES, (3, taps), strict=True)):
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(1 + deepstack, len(places), 64, generator=generator)
            features = Features(embeddings=values[0], deepstack=tuple(values[1:]))
            where = decoder.token_places((places,), ids)
            placed.append(PlacedFeatures(features=features, places=where))
        found = decoder.embed(ids, placed)
        assert torch.equal(found, decoder.embed(ids, placed[::-1]))
        text, *streams = found.chunk(4)  # [s, 1, hidden] each
        for places, each in zip(PLACES, placed, strict=True):
            assert torch.equal(text[places, 0], each.features.embeddings)
        for number, stream in enumerate(streams):
            expected = torch.zeros(12, 64)
            for places, each in zip(PLACES, placed, strict=True):
                for values in each.features.deepstack[number : number + 1]:
                    expected[places] = values
            assert torch.equal(stream[:, 0], expected)


@pytest.mark.parametrize("taps", [0, 2, 3])
def test_an_encoder_leaves_the_other_s_features_alone(taps: int) -> None:
    run_ranks(embedded, 1, taps=taps)
