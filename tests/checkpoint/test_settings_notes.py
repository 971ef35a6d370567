"""The notes that keep a run from going on with another model's checkpoint, or with other data."""

import copy
from argparse import Namespace
from pathlib import Path

import pytest

from loongplug.checkpoint.settings_notes import (
    ARCHITECTURE_FILE,
    DATA_FILE,
    check_architecture,
    check_data_note,
    write_note,
)
from loongplug.training.arguments import settle_transparency
from loongplug.training.config import compose_model, to_yaml_data

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
    for key, value in (
        *(("image_encoder.freeze", True), ("image_encoder.recompute", True)),
        *(("image_encoder.tensor_model_parallel_size", 2), ("image_encoder.mode", "uniform")),
        *(("foundation.initializer_range", 0.01), ("foundation.max_position_embeddings", 8192)),
        ("image_encoder.deepstack_layers", [0, 1]),
    ):
        check_architecture(tmp_path / "new" / "ckpt", changed(key, value))


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


def test_former_names_of_config_classes_make_no_other_model(tmp_path):
    config = to_yaml_data(compose_model(model_name="qwen3_vl_tiny").config)
    noted = copy.deepcopy(config)
    place = "loongplug.models.qwen3_vl.config"  # of all four, in notes up to version 0.2
    noted["model"]["_target_"] = f"{place}.Qwen3VLConfig"
    noted["model"]["image_encoder"]["_target_"] = f"{place}.Qwen3VisionConfig"
    noted["model"]["image_projector"]["_target_"] = f"{place}.Qwen3ProjectorConfig"
    noted["model"]["foundation"]["_target_"] = f"{place}.Qwen3DecoderConfig"
    write_note(tmp_path / ARCHITECTURE_FILE, noted)
    check_architecture(tmp_path, config)
    noted["model"]["foundation"]["_target_"] = "loongplug.models.qwen3_vl_moe.config.Other"
    write_note(tmp_path / ARCHITECTURE_FILE, noted)
    with pytest.raises(ValueError, match=r"foundation._target_ is loongplug.models.qwen3_vl_moe.O"):
        check_architecture(tmp_path, config)


def test_a_setting_that_is_newer_than_the_checkpoint_and_not_used_is_none(tmp_path):
    write_note(tmp_path / ARCHITECTURE_FILE, MODEL)
    newer = "foundation.shared_expert_ffn_hidden_size"
    check_architecture(tmp_path, changed(newer, None))
    with pytest.raises(ValueError, match="is absent in the checkpoint, 48 here"):
        check_architecture(tmp_path, changed(newer, 48))


def test_a_checkpoint_from_elsewhere_passes(tmp_path):
    check_architecture(tmp_path, MODEL)
    check_architecture(tmp_path / "nowhere", MODEL)


def test_a_damaged_note_is_named(tmp_path):
    for damaged in (b"{", b'{"\xff'):
        (tmp_path / ARCHITECTURE_FILE).write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            check_architecture(tmp_path, MODEL)
    (tmp_path / ARCHITECTURE_FILE).write_text("[]")
    with pytest.raises(ValueError, match=r"is not a note of LoongPlug.*remove it: the tensors are"):
        check_architecture(tmp_path, MODEL)


DATA = {
    "rows": {"file 1": {"bytes": 10, "digest": "aa"}},
    "settings": {"seed": 1, "weights": (0.5, 0.5)},
}


def with_settings(**settings: object) -> dict[str, object]:
    return {**DATA, "settings": {**DATA["settings"], **settings}}


def test_the_same_data_pass_and_others_are_named(tmp_path: Path) -> None:
    write_note(tmp_path / DATA_FILE, DATA)
    check_data_note(tmp_path, DATA)
    with pytest.raises(ValueError, match="settings seed was 1, is 2") as raised:
        check_data_note(tmp_path, with_settings(seed=2))
    assert "--finetune" in str(raised.value)
    assert str(tmp_path / DATA_FILE) in str(raised.value)
    with pytest.raises(ValueError, match="settings packing was absent, is True"):
        check_data_note(tmp_path, with_settings(packing=True))
    rows = {"file 1": {"bytes": 11, "digest": "bb"}, "file 2": {"bytes": 1, "digest": "cc"}}
    with pytest.raises(ValueError, match="rows file 1 bytes was 10, is 11") as raised:
        check_data_note(tmp_path, {**DATA, "rows": rows})
    assert "rows file 2 digest was absent, is cc" in str(raised.value)
    with pytest.raises(ValueError, match="and 2 more"):
        check_data_note(tmp_path, {"rows": rows, "settings": {"a": 1}})


def test_a_part_that_older_notes_lack_passes_once(tmp_path: Path) -> None:
    newer = {**DATA, "tokenizer": {"added_tokens.json": "aa"}}
    write_note(tmp_path / DATA_FILE, DATA)
    check_data_note(tmp_path, newer)
    write_note(tmp_path / DATA_FILE, newer)
    with pytest.raises(ValueError, match=r"tokenizer added_tokens.json was aa, is absent"):
        check_data_note(tmp_path, {**DATA, "tokenizer": {}})


@pytest.mark.parametrize("content", ["[]", "3", "null", '"rows"', "{}", '{"name": "a package"}'])
def test_another_file_of_that_name_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / DATA_FILE
    path.write_text(content)
    with pytest.raises(
        ValueError, match=r"is not a note of LoongPlug.*rows, settings; remove it to"
    ):
        check_data_note(tmp_path, DATA)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="is not a file; remove it to go on"):
        check_data_note(tmp_path, DATA)


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    write_note(tmp_path / DATA_FILE, with_settings(seed="x" * 10_000))
    with pytest.raises(ValueError, match=r"settings seed was x{200}\.\.\., is 1"):
        check_data_note(tmp_path, DATA)


def test_a_run_that_goes_on_treats_transparency_as_it_did(tmp_path, capsys) -> None:
    def settled(folder: Path, *, rank: int = 0, **given: object) -> tuple[str, str]:
        options = {"transparency": None, "load": str(folder), "finetune": False, "rank": rank}
        args = Namespace(**{**options, **given})
        settle_transparency(args)
        return args.transparency, capsys.readouterr().out

    assert settled(tmp_path) == ("white", "")
    write_note(tmp_path / DATA_FILE, DATA)  # as before there was such a flag, and of runs that drop
    transparency, said = settled(tmp_path)
    assert transparency == "drop"
    assert said.count("\n") == 1
    assert f"{tmp_path} says nothing of transparency" in said
    assert settled(tmp_path, rank=1) == ("drop", "")
    assert settled(tmp_path, finetune=True) == ("white", "")
    assert settled(tmp_path, transparency="white") == ("white", "")
    with pytest.raises(ValueError, match="settings transparency was absent, is white"):
        check_data_note(tmp_path, with_settings(transparency="white"))
    write_note(tmp_path / DATA_FILE, with_settings(transparency="white"))
    assert settled(tmp_path) == ("white", "")
