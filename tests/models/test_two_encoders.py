"""A model with two encoders, against one whose only encoder has the weights and media of both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hf_batches import IMAGE, TOKEN_IDS, VIDEO, Batch, batch
from hf_models import Layout, build_chunks, decoder_config
from image_units import media_of, unit_of
from ranks import model_parallel, run_ranks
from torch import Tensor

from loongplug.data.microbatch import MediaInput, Microbatch, Unit
from loongplug.models.entries import Entry, Role, checked
from loongplug.models.features import Features, PlacedFeatures
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.qwen3_vl.config import (
    Qwen3DecoderConfig,
    Qwen3ProjectorConfig,
    Qwen3VisionConfig,
    Qwen3VLConfig,
)

EYES = Entry(
    name="image_encoder",
    role=Role.ENCODER,
    media=("image",),
    beside=("image_projector",),
    into="text_decoder",
)
FILMS = replace(EYES, name="film_encoder", media=("video",), beside=("film_projector",))
DECODER = Entry(name="text_decoder", role=Role.DECODER)
ARCHITECTURE = Qwen3VLConfig(
    image_encoder=Qwen3VisionConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=2,
        num_position_embeddings=64,
        deepstack_layers=(0, 1),
    ),
    image_projector=Qwen3ProjectorConfig(),
    foundation=Qwen3DecoderConfig(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=128,
        mrope_section=(4, 2, 2),
    ),
    **TOKEN_IDS,
)
LAYOUTS = [Layout(), Layout(tp=2, sequence_parallel=True)]


def models(layout: Layout) -> tuple[MultimodalModel, MultimodalModel]:
    """One with one encoder, and one with two like it; they share the decoder and its weights."""
    config = decoder_config(ARCHITECTURE, layout)
    (one,), (first,), (second,) = (build_chunks(ARCHITECTURE, config, layout) for _ in range(3))
    encoding = {}
    for entry, other in ((EYES, first), (FILMS, second)):
        for name, like in zip(entry.modules, EYES.modules, strict=True):
            encoding[name] = other.get_submodule(like)
            with torch.no_grad():
                for own, given in zip(
                    encoding[name].parameters(), one.get_submodule(like).parameters(), strict=True
                ):
                    own.copy_(given)
    both = MultimodalModel(
        one.text_decoder,
        config=config,
        entries=checked((EYES, FILMS, DECODER)),
        encoding=encoding,
        pg_collection=one.pg_collection,
        states=dict.fromkeys(("image_encoder", "film_encoder", "text_decoder")),
    )
    return one, both


def split(data: Batch, number: int) -> Microbatch:
    """A sample whose images are for one encoder, and whose videos are for the other."""
    microbatch = data.microbatch(number, 1)
    media, (ids,) = media_of(microbatch), microbatch.input_ids
    sizes = [medium.patches for medium in data.media[number]]
    pieces = media.rows.split(sizes)
    units = {}
    for name, token, is_video in ((EYES.name, IMAGE, False), (FILMS.name, VIDEO, True)):
        chosen = [n for n, each in enumerate(data.media[number]) if each.is_video == is_video]
        units[name] = Unit(
            grids=tuple(data.media[number][n].grid for n in chosen),
            places=((ids == token).nonzero().flatten().numpy(),),
            media=MediaInput(
                rows=torch.cat([media.rows[:0], *(pieces[n] for n in chosen)]),
                grids=media.grids[chosen],
            ),
        )
    assert sum(unit.tokens for unit in units.values()) == unit_of(microbatch).tokens
    return replace(microbatch, units=units)


def trained(
    model: MultimodalModel,
    microbatches: Sequence[Microbatch],
    units: Sequence[Mapping[str, Unit]] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the tokens, and the gradients of all parameters by name."""
    model.zero_grad()
    losses = []
    for number, each in enumerate(microbatches):
        loss = model(
            each.input_ids,
            each.position_ids,
            units=each.units if units is None else units[number],
            number=number,
            labels=each.labels,
            loss_mask=each.loss_mask,
        )
        loss.backward(each.loss_mask)
        losses.append(loss.detach())
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    return torch.cat(losses), gradients


def require_sums(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """An encoder's gradient for all media is the sum of those of two that share them."""
    for name, wanted in expected.items():
        own = found[name]
        if name.startswith("image_"):
            own = own + found[f"film_{name.removeprefix('image_')}"]
        assert wanted.abs().max() > 0, name
        assert (own - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 1e-7, name


def two_for_one(rank: int, *, layout: Layout) -> None:
    data = batch()
    with model_parallel(tp=layout.tp):
        one, both = models(layout)
        whole = [data.microbatch(number, 1) for number in range(len(data.samples))]
        parts = [split(data, number) for number in range(len(data.samples))]
        losses, gradients = trained(one, whole)
        found = trained(both, parts)
        assert torch.allclose(found[0], losses, atol=1e-5)
        require_sums(found[1], gradients)
        for name in (EYES.name, FILMS.name):
            mine = [each for key, each in found[1].items() if key.startswith(f"{name}.")]
            assert mine
            assert all(each.abs().max() > 0 for each in mine)


def from_a_source(rank: int, *, layout: Layout) -> None:
    """One of two encoders is asked within the forward, the other's features come from elsewhere."""
    data = batch()
    with model_parallel(tp=layout.tp):
        _, both = models(layout)
        parts = [split(data, number) for number in range(len(data.samples))]
        losses, gradients = trained(both, parts)
        asked = []

        class Source:
            def features(self, number: int) -> Features:
                asked.append(number)
                unit = parts[number].units[FILMS.name]
                places = both.text_decoder.token_places(unit.places, parts[number].input_ids)
                return both.text_decoder.share_of(both.encode(FILMS, unit.media), places)

        both.feature_sources = {FILMS.name: Source()}
        somewhere_else = [
            {**each.units, FILMS.name: replace(each.units[FILMS.name], media=None)}
            for each in parts
        ]
        found = trained(both, parts, somewhere_else)
        assert asked == list(range(len(parts)))
        assert torch.equal(found[0], losses)
        assert all(torch.equal(found[1][name], each) for name, each in gradients.items())


def without_deepstack(rank: int) -> None:
    """An encoder without such features adds nothing to those of the other."""
    with model_parallel():
        one, _ = models(Layout())
        decoder = one.text_decoder
        microbatch = split(batch(), 2)  # a video, then an image
        ids = microbatch.input_ids
        placed: list[PlacedFeatures] = []
        for number, (name, taps) in enumerate({EYES.name: 2, FILMS.name: 0}.items()):
            unit = microbatch.units[name]
            assert unit.tokens
            values = torch.randn(
                3, unit.tokens, 32, generator=torch.Generator().manual_seed(number)
            )
            features = Features(embeddings=values[0], deepstack=tuple(values[1 : 1 + taps]))
            places = decoder.token_places(unit.places, ids)
            placed.append(PlacedFeatures(features=features, places=places))
        found = decoder.embed(ids, placed)
        assert torch.equal(found, decoder.embed(ids, placed[::-1]))
        text, first, second = found.chunk(3)  # [s, 1, hidden] each
        here, (there,) = placed[0].places.position, microbatch.units[FILMS.name].places
        assert torch.equal(text[here, 0], placed[0].features.embeddings)
        assert torch.equal(text[there, 0], placed[1].features.embeddings)
        for stream, values in zip((first, second), placed[0].features.deepstack, strict=True):
            assert torch.equal(stream[here, 0], values)
            assert stream.count_nonzero() == values.count_nonzero()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_encoders_train_as_one_that_has_the_media_of_both(layout: Layout) -> None:
    run_ranks(two_for_one, layout.world_size, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_either_may_have_a_source_of_its_own(layout: Layout) -> None:
    run_ranks(from_a_source, layout.world_size, layout=layout)


@pytest.mark.quick
def test_an_encoder_without_deepstack_leaves_the_other_s_alone() -> None:
    run_ranks(without_deepstack, 1)
