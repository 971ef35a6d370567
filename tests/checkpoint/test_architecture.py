"""The note that keeps a run from loading another model's checkpoint."""

import copy

import pytest

from loongplug.checkpoint.notes import (
    ARCHITECTURE_FILE,
    check_architecture,
    write_note,
)

pytestmark = pytest.mark.quick

MODEL = {
    "_target_": "loongplug.models.qwen3_vl.Qwen3VLConfig",
    "image_encoder": {
        "num_layers": 3,
        "deepstack_layers": (0, 1),
        "freeze": False,
        "recompute": False,
        "tensor_model_parallel_size": None,
    },
    "foundation": {
        "hidden_size": 128,
        "mrope_section": [6, 5, 5],
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
    },
}


def changed(path: str, value: object) -> dict:
    model = copy.deepcopy(MODEL)
    *parents, key = path.split(".")
    target = model
    for parent in parents:
        target = target[parent]
    target[key] = value
    return model


def test_the_same_model_passes_and_its_layout_does_not_matter(tmp_path):
    write_note(tmp_path / "new" / "ckpt" / ARCHITECTURE_FILE, MODEL)
    check_architecture(tmp_path / "new" / "ckpt", copy.deepcopy(MODEL))
    layout = (("tensor_model_parallel_size", 2), ("mode", "uniform"))
    for key, value in (("freeze", True), ("recompute", True), *layout):
        check_architecture(tmp_path / "new" / "ckpt", changed(f"image_encoder.{key}", value))
    check_architecture(tmp_path / "new" / "ckpt", changed("image_encoder.deepstack_layers", [0, 1]))


@pytest.mark.parametrize(
    ("key", "value"), [("initializer_range", 0.01), ("max_position_embeddings", 8192)]
)
def test_how_it_began_and_how_long_it_may_read_do_not_make_another_model(tmp_path, key, value):
    write_note(tmp_path / ARCHITECTURE_FILE, MODEL)
    check_architecture(tmp_path, changed(f"foundation.{key}", value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "foundation.hidden_size",
            256,
            "foundation.hidden_size is 128 in the checkpoint, 256 here",
        ),
        (
            "image_encoder.deepstack_layers",
            (1,),
            "deepstack_layers is [0, 1] in the checkpoint, [1]",
        ),
        ("foundation.vocab_size", 9, "foundation.vocab_size is absent in the checkpoint, 9 here"),
        ("image_encoder.num_layers", {"a": 1}, "image_encoder.num_layers.a is absent"),
    ],
)
def test_another_model_is_refused_by_what_differs(tmp_path, key, value, message):
    write_note(tmp_path / ARCHITECTURE_FILE, MODEL)
    with pytest.raises(ValueError, match="is of another model") as caught:
        check_architecture(tmp_path, changed(key, value))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_setting_that_is_newer_than_the_checkpoint_and_not_used_is_none(tmp_path):
    write_note(tmp_path / ARCHITECTURE_FILE, MODEL)
    newer = "foundation.shared_expert_ffn_hidden_size"
    check_architecture(tmp_path, changed(newer, None))
    with pytest.raises(ValueError, match="is absent in the checkpoint, 48 here"):
        check_architecture(tmp_path, changed(newer, 48))


def test_a_setting_that_went_away_is_a_difference_too(tmp_path):
    write_note(tmp_path / ARCHITECTURE_FILE, changed("foundation.moe", 2))
    with pytest.raises(ValueError, match=r"foundation.moe is 2 in the checkpoint, absent here"):
        check_architecture(tmp_path, MODEL)


def test_only_the_first_differences_are_shown(tmp_path):
    write_note(tmp_path / ARCHITECTURE_FILE, {f"key{n}": n for n in range(8)})
    with pytest.raises(ValueError, match="and 3 more") as caught:
        check_architecture(tmp_path, {f"key{n}": -1 for n in range(8)})
    assert "key4" in str(caught.value)
    assert "key5" not in str(caught.value)


def test_a_checkpoint_from_elsewhere_passes(tmp_path):
    check_architecture(tmp_path, MODEL)
    check_architecture(tmp_path / "nowhere", MODEL)


def test_a_damaged_note_is_named(tmp_path):
    (tmp_path / ARCHITECTURE_FILE).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        check_architecture(tmp_path, MODEL)
    (tmp_path / ARCHITECTURE_FILE).write_text("[]")
    with pytest.raises(ValueError, match=r"is not a note of LoongPlug.*remove it: the tensors are"):
        check_architecture(tmp_path, MODEL)
