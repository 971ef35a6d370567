"""Runs that freeze: resumed in other modes, under another freeze, and patterns that are wrong."""

import pytest
from compared_runs import same, train
from ranks import RankError

pytestmark = pytest.mark.slow

TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
FULL = (*PP, "--enable-full-hetero-dp")
SHARDED = "--use-distributed-optimizer"
ENCODER, PROJECTOR, DECODER = (
    f"model.{module}.freeze=true" for module in ("image_encoder", "image_projector", "foundation")
)
SOME = ("--freeze-parameters", "*.layers.2.*", "*patch_embed*")


def saved(flags, folder, *more, ranks=2):
    """Four steps with a checkpoint after two of them, which the folder's tracker then names."""
    steps = train([*flags, "--save", str(folder), "--save-interval", "2"], *more, ranks=ranks)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return steps


@pytest.mark.parametrize(
    ("frozen", "optimizer"),
    [(SOME, (SHARDED,)), ((ENCODER, DECODER), ("--bf16",))],
    ids=["pattern-sharded", "all-but-projector-bf16"],
)
def test_a_run_goes_on_in_another_mode(flags, tmp_path, frozen, optimizer):
    """What has no state (a whole module, one layer of four) is no reason not to save or load."""
    expected = saved(flags, tmp_path, *FULL, *frozen, *optimizer)
    load = ("--load", str(tmp_path))
    found = train(flags, *TP, *frozen, *optimizer, *load, ranks=2)
    if "--bf16" in optimizer:
        assert [step for pair in found for step in pair] == pytest.approx(
            [step for pair in expected[2:] for step in pair], rel=1e-2
        )
    else:
        assert same(found, expected[2:]), (found, expected)


@pytest.fixture(scope="module")
def encoder_frozen(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "run"
    return str(folder), saved(flags, folder, *FULL, SHARDED, ENCODER)


def test_what_was_frozen_has_no_state_to_train_with(flags, encoder_frozen):
    load = ("--load", encoder_frozen[0], SHARDED)
    for more, said in (
        ((), r"no optimizer state for image_encoder\.blocks"),
        (SOME, "saved with no parameters frozen by pattern, and here some are"),
    ):
        with pytest.raises(RankError, match=said) as raised:
            train(flags, *TP, *load, *more, ranks=2)
        assert len(raised.value.errors) == 2


def test_the_next_phase_takes_the_weights_alone(flags, encoder_frozen):
    """As SFT after alignment: --finetune, in another mode and with another freeze."""
    folder, before = encoder_frozen
    once = ("--load", folder, "--finetune", "--train-iters", "1")
    ((expected, _),) = train(flags, *once, ENCODER)
    ((found, _),) = train(flags, *TP, SHARDED, *SOME, *once, ranks=2)
    assert found == pytest.approx(expected, rel=2e-5)
    assert found < 0.95 * before[0][0]


def test_a_pattern_without_effect_is_the_same_error_on_every_rank(flags):
    """One that matches on the other stage alone is none."""
    with pytest.raises(RankError) as raised:
        train(
            *(flags, "--freeze-parameters", "*final_layernorm*", "*.linear_qvk.*"),
            *("--train-parameters", "*word_embeddings*", *PP),
            ranks=2,
        )
    assert len(raised.value.errors) == 2
    for error in raised.value.errors.values():
        assert "--freeze-parameters '*.linear_qvk.*' matches no parameter" in error
        assert "layers.*.self_attention.linear_qkv.weight" in error
        assert "--train-parameters '*word_embeddings*' matches only parameters that train" in error
        assert "final_layernorm" not in error.rpartition("ValueError: ")[2]


def test_a_run_in_which_nothing_trains_is_the_same_error_on_every_rank(flags):
    said = "Every parameter of the model is frozen: there is nothing to train. Drop a freeze, or"
    with pytest.raises(RankError, match=said) as raised:
        train(flags, ENCODER, PROJECTOR, DECODER, *PP, ranks=2)
    assert len(raised.value.errors) == 2
