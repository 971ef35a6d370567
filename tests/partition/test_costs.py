"""What layers cost: the rule, its measured figures, and the count of whole steps."""

from dataclasses import replace
from math import prod

import pytest
from costed import FULL, LENGTH, costs, media, parsed, trains_of

from loongplug.estimate.run_of_flags import OwnRanks
from loongplug.hetero.placement import one_apart
from loongplug.models.amounts import ModelAmounts
from loongplug.models.entries import encoders as entry_encoders
from loongplug.parallel.layout import Layout
from loongplug.training.layer_costs import Cost

pytestmark = pytest.mark.quick

GRID = (1, 8, 8)
EYES, DECODER = "image_encoder", "text_decoder"
# qwen3_vl_tiny: four decoder layers of width 128, 4 heads of 32, 2 groups, MLP 384; three encoder
# layers of width 64 and MLP 128.
TOKENS, PATCHES = 2 * LENGTH, prod(GRID)
LINEARS = 2 * (128 * 256 + 128 * 128 + 3 * 128 * 384) * TOKENS
ATTENTION = 4 * 128 * 2 * LENGTH * (LENGTH + 1) // 2  # two products of a pair, in two rows
EYES_LINEARS = 2 * (4 * 64 * 64 + 2 * 64 * 128) * PATCHES
EYES_ATTENTION = 4 * 64 * PATCHES**2
FROZEN = (f"{EYES}.*", f"{DECODER}.*")  # the projector trains


def ratio(cost):
    return cost.backward / cost.forward


@pytest.mark.parametrize(
    "model",
    [
        *("qwen3_vl_tiny", "qwen2_5_vl_tiny", "qwen3_vl_moe_tiny", "llava_tiny"),
        *("internvl_tiny", "qwen2_audio_tiny", "qwen2_5_omni_tiny"),
    ],
)
@pytest.mark.parametrize("freeze", [(), ("*_encoder.*", f"{DECODER}.*")])
def test_layers_add_up_to_the_step(model, freeze):
    """As MFU counts it, of all rows and tokens at once; rows of text are full."""
    run = parsed(model=model)
    first = next(iter(run.model.encoders))
    grid = run.model.encoder(first).grid_of(16)
    found = costs(run, media(run, grid, grid), freeze=freeze)
    hugging_face = run.family.load_hugging_face(run.model)
    work = ModelAmounts.of(run.model, hugging_face, trains=trains_of(run, freeze=freeze).trains)
    step = work.of_samples((LENGTH, LENGTH), {first: (grid, grid)})
    assert sum(each.whole().total for each in found.values()) == pytest.approx(step, rel=1e-5)


def test_all_trained_is_three_times_forward():
    found = costs(parsed(), media(parsed(), GRID))
    assert list(found) == [EYES, DECODER]
    assert (
        found[DECODER].layers
        == (Cost(forward=LINEARS + ATTENTION, backward=2 * (LINEARS + ATTENTION)),) * 4
    )
    assert found[DECODER].last == Cost(
        forward=2 * 128 * 128 * TOKENS, backward=4 * 128 * 128 * TOKENS
    )
    assert found[DECODER].first == Cost()  # embeddings are looked up
    assert found[EYES].layers[1] == Cost(
        forward=EYES_LINEARS + EYES_ATTENTION, backward=2 * (EYES_LINEARS + EYES_ATTENTION)
    )
    assert found[EYES].first.forward == 2 * 1536 * 64 * PATCHES


def test_what_is_frozen_has_as_much_backward_as_what_is_before_asks_for():
    run = parsed(**FULL)
    found = costs(run, media(run, GRID), freeze=FROZEN)
    assert {each.backward for each in found[EYES].layers} == {0}
    assert found[EYES].last.backward > 0  # the projector's
    # The products of attention have two gradients each, whatever trains.
    frozen = Cost(
        forward=LINEARS + ATTENTION,
        backward=LINEARS + 2 * ATTENTION,
        again=LINEARS + ATTENTION,
    )
    assert set(found[DECODER].layers) == {frozen}
    nothing = costs(run, media(run, GRID), freeze=("*",), train=(f"{DECODER}.output_layer.*",))
    assert nothing[DECODER].whole().backward == nothing[DECODER].last.forward


def test_a_forward_more_is_only_where_gradients_are_needed():
    third = (f"{DECODER}.decoder.layers.2.*",)
    run = parsed("model.image_encoder.recompute=true", **FULL)
    found = costs(run, media(run, GRID), freeze=("*",), train=third)
    again = [each.again / each.forward for each in found[DECODER].layers]
    assert again == [0, 0, 1, 1]
    assert [each.again for each in found[EYES].layers] == [0, 0, 0]
    found = costs(run, media(run, GRID))
    assert [each.again for each in found[EYES].layers] == [EYES_LINEARS + EYES_ATTENTION] * 3
    assert found[DECODER].stage(0, 2).backward == 3 * found[DECODER].stage(0, 2).forward


@pytest.mark.parametrize(
    ("modules", "again"),
    [
        (None, ATTENTION),
        (["core_attn"], ATTENTION),
        (["mlp"], 2 * 3 * 128 * 384 * TOKENS),
        (["layernorm"], 0),
    ],
)
def test_selective_recompute_is_what_it_names(modules, again):
    run = parsed(recompute_granularity="selective", recompute_modules=modules)
    assert {each.again for each in costs(run, media(run))[DECODER].layers} == {again}


def test_recompute_of_blocks_is_of_each_stage_s_first_layers():
    run = parsed(**{**FULL, "recompute_method": "block"})
    found = costs(run, media(run))[DECODER]
    layer = LINEARS + ATTENTION
    assert found.stage(0, 3) == Cost(forward=3 * layer, backward=7 * layer)
    assert found.stage(1, 2) == Cost(forward=layer, backward=3 * layer)


def test_adapters_train_on_a_frozen_base():
    run = parsed("+model.foundation.lora.rank=4", "model.image_encoder.freeze=true")
    found = costs(run, media(run, GRID))[DECODER]
    adapters = 2 * 4 * ((128 + 128 + 128 + 384) + (256 + 128 + 768 + 128)) * TOKENS
    assert found.layers[1] == Cost(
        forward=LINEARS + ATTENTION + adapters,
        backward=LINEARS + 2 * ATTENTION + 2 * adapters,
    )


def test_media_are_the_mean_and_ranks_share_them():
    run = parsed()
    whole, half = (
        costs(run, *each)[EYES] for each in ([media(run, GRID)], [media(run, GRID), media(run)])
    )
    assert 2 * half.layers[0].forward == whole.layers[0].forward
    tp = {"tensor_model_parallel_size": 2}
    for overrides, flags, ranks, apart in (
        ((), {}, 2, 2),
        (("model.image_encoder.tensor_model_parallel_size=1",), {}, 1, 1),  # each the same units
        ((), {"enable_encoder_hetero_dp": True}, 2, 2),  # each other units
    ):
        split = parsed(*overrides, **tp, **flags)
        for shared, by in (
            (costs(split, media(split, GRID)), ranks),
            (costs(split, media(split, GRID), apart=[EYES]), apart),
        ):
            assert by * shared[EYES].layers[0].forward == whole.layers[0].forward
            assert 2 * shared[DECODER].layers[0].forward == LINEARS + ATTENTION


@pytest.mark.parametrize(("flags", "ranks"), [({}, 1), ({"enable_full_hetero_dp": True}, 2 * 2)])
def test_ranks_of_a_row_share_the_decoder_s_work_and_where_they_can_its_media(flags, ranks):
    """In the uniform mode each of them encodes all; full separation has all ranks encode."""
    whole, shared = (
        costs(run, media(run, GRID)) for run in (parsed(), parsed(context_parallel_size=2, **flags))
    )
    assert 2 * shared[DECODER].layers[0].forward == whole[DECODER].layers[0].forward
    assert ranks * shared[EYES].layers[0].forward == whole[EYES].layers[0].forward


def test_convolutions_of_sound_come_before_the_layers():
    run = parsed(model="qwen2_audio_tiny")
    audio = run.model.audio_encoder
    found = costs(run, media(run, audio.grid_of(16)))["audio_encoder"].first
    sounds, states = (
        3 * audio.hidden_size * width for width in (audio.mel_bins, audio.hidden_size)
    )
    # Nobody asks for the gradient of a sound.
    assert ratio(found) == pytest.approx((sounds + 2 * states) / (sounds + states))


@pytest.mark.parametrize(
    ("encoders", "decoders", "tp", "part"),
    [(1, 1, 1, 1), (2, 1, 1, 1 / 2), (1, 2, 2, 1), (1, 3, 1, 3), (3, 2, 1, 1), (4, 1, 1, 1 / 2)],
)
def test_a_replica_on_ranks_of_its_own_does_the_samples_that_it_encodes(
    encoders, decoders, tp, part
):
    """The busiest one's, of two samples a microbatch, on each of its tensor parallel ranks."""
    run = parsed()
    (entry,) = entry_encoders(run.model.entries())
    placement = one_apart(Layout(dp=decoders), entry=entry, tp=1, dp=encoders, rank_offset=decoders)
    slot = placement.pieces(EYES, micro_batch_size=2)
    each = [tuple(x for x in slot if x.replica == number) for number in range(encoders)]
    made = max(each, key=lambda one: sum(len(part.samples) for part in one))
    own = OwnRanks(
        name=EYES, layout=Layout(tp=tp, dp=encoders), replica=each.index(made), made=made
    )
    found = costs(run, media(run, GRID), own=(own,))[EYES].whole()
    alone = costs(run, media(run, GRID))[EYES].whole()
    assert found.forward == pytest.approx(part * alone.forward, rel=1e-6)
    assert found.backward == pytest.approx(part * alone.backward, rel=1e-6)


def test_packs_attend_within_their_segments():
    run = parsed(micro_batch_size=1)
    pack = media(run)
    packed = replace(pack, segments=(40, 20, 4))
    plain, found = (costs(run, each)[DECODER].layers[0].forward for each in (pack, packed))
    pairs = [length * (length + 1) // 2 for length in (64, 40, 20, 4)]
    assert plain - found == 4 * 128 * (pairs[0] - sum(pairs[1:]))
