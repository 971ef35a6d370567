"""Models composed from YAML: overrides, errors, and what _target_ may not do."""

import os
from pathlib import Path
from typing import Any

import pytest

from loongplug.models.registry import family_of
from loongplug.training.config import available_models, compose_model

TINY = "qwen3_vl_tiny"


def problem(**arguments: Any) -> str:
    """What composing says when it refuses."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the tests look at the message)
        compose_model(**arguments)
    return str(caught.value)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.quick
def test_every_model_is_found_by_name_and_fits_its_family() -> None:
    assert {TINY, "qwen3_vl_8b"} <= set(available_models())
    for name in available_models():
        composed = compose_model(model_name=name)
        assert composed.family == family_of(composed.config)
    assert compose_model(model_name=TINY).config.image_token_id is None  # the tokenizer's to say


# Overrides.


@pytest.mark.quick
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_every_sign_sets(sign: str) -> None:
    config = compose_model(
        model_name=TINY,
        overrides=[
            f"{sign}model.image_encoder.freeze=True",
            f"{sign}model.image_encoder.deepstack_layers=[0,1,2]",
            f"{sign}model.foundation.rotary_base=500",
        ],
    ).config
    assert config.image_encoder.freeze is True
    assert config.image_projector.freeze is False
    assert config.image_encoder.deepstack_layers == (0, 1, 2)
    assert (config.foundation.rotary_base, type(config.foundation.rotary_base)) == (500, float)


@pytest.mark.quick
def test_key_left_at_its_default_can_be_overridden(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "# @package model\ndefaults:\n  - /qwen3_vl/qwen3_vl_tiny@_here_\n"
        "  - override /image_projector@image_projector: bare\n  - _self_\n",
    )
    (tmp_path / "image_projector").mkdir()
    write(
        tmp_path / "image_projector",
        "_target_: loongplug.models.qwen3_vl.Qwen3ProjectorConfig\n",
        "bare.yaml",
    )
    config = compose_model(config_file=file, overrides=["model.image_projector.freeze=true"]).config
    assert config.image_projector.freeze is True


@pytest.mark.quick
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "model.image_encoder.frezee=True",
            "is not a key of Qwen3VisionConfig; the closest is freeze",
        ),
        ("model.image_encodr.freeze=True", "the closest is image_encoder"),
        ("image_encoder.freeze=True", "such as model.image_encoder.freeze"),
        ("freeze=True", "freeze is not a key of a model"),
        ("modle.foundation.num_layers=4", "such as model.foundation.num_layers"),
        ("model.foundation.num_layers=four", "is 'four', but should be a valid integer"),
        ("model.foundation.num_layers=4.0", "is 4.0, but should be a valid integer"),
        ("model.foundation.num_layers=true", "is True, but should be a valid integer"),
        ("model.foundation.num_layers=null", "is null, but should be a valid integer"),
        ("model.foundation.rotary_base='1e4'", "is '1e4', but should be a valid number"),
        ("model.foundation.tie_word_embeddings=1", "is 1, but should be a valid boolean"),
        ("model.foundation.mrope_section=[16,6]", "has 2 values, but should have 3"),
        (
            "model.foundation.mrope_section=[6,5,x]",
            "mrope_section[2] is 'x', but should be a valid integer",
        ),
        ("model.image_encoder.mode=separated", "is 'separated', but should be 'uniform', "),
        ("model.image_encoder.deepstack_layers=3", "is 3, but should be a valid list"),
        ("model.foundation.rotary_base=nan", "is nan, but should be a finite number"),
        ("model.image_projector.lr_mult=-inf", "is -inf, but should be a finite number"),
        (f"model.foundation.rotary_base={10**400}", "000, but should be a valid number"),
        ("model.image_token_id=a", "is 'a', but should be a valid integer"),
        ("model.foundation=null", "is null, but should be a mapping for Qwen3DecoderConfig"),
        ("model.foundation.num_layers=1,2", "gives several values; write a list as [1,2]"),
        ("model.foundation.num_layers=[1", "is not a YAML value"),
        ("model.foundation.num_layers=${model.nope}", "Interpolation key 'model.nope' not found"),
        ("~model.foundation.num_layers=1", "is not an override; write key=value"),
    ],
)
def test_bad_overrides_say_what_and_where(override: str, expected: str) -> None:
    message = problem(model_name=TINY, overrides=[override])
    assert expected in message
    assert "\n" not in message
    if "Interpolation" not in expected:
        assert override in message  # where it was said


@pytest.mark.quick
def test_all_problems_are_reported_at_once() -> None:
    message = problem(
        model_name=TINY,
        overrides=["model.foundation.num_layers=x", "model.image_projector.epsilon=1"],
    )
    assert len(message.splitlines()) == 2


# Files.


@pytest.mark.quick
def test_own_file_mounts_own_and_packaged_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's mine = a b"
    (folder / "decoders").mkdir(parents=True)
    file = write(
        folder,
        "# @package model\ndefaults:\n"
        "  - /image_encoder@image_encoder: qwen3_vit_tiny\n"
        "  - /image_projector@image_projector: qwen3_merger\n"
        "  - decoders@foundation: mine\n  - _self_\n"
        "_target_: loongplug.models.qwen3_vl.Qwen3VLConfig\n"
        "image_encoder:\n  num_layers: 5\n",
    )
    packaged = available_models()[TINY].parent.parent / "qwen3" / "qwen3_tiny.yaml"
    write(folder / "decoders", packaged.read_text().replace("num_layers: 4", "num_layers: 8"))
    config = compose_model(config_file=file).config
    assert (config.image_encoder.num_layers, config.foundation.num_layers) == (5, 8)
    monkeypatch.chdir(folder)
    assert compose_model(config_file=Path("mine.yaml")).config == config


@pytest.mark.quick
def test_printed_yaml_composes_to_the_same_model(tmp_path: Path) -> None:
    first = compose_model(model_name="qwen3_vl_8b", overrides=["model.image_encoder.freeze=True"])
    second = compose_model(config_file=write(tmp_path, first.to_yaml()))
    assert second.config == first.config
    assert second.yaml == first.yaml
    assert isinstance(second.config.foundation.layernorm_epsilon, float)


@pytest.mark.quick
def test_unknown_and_missing_keys_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "qwen3").mkdir()
    module = write(
        tmp_path / "qwen3",
        "_target_: loongplug.models.qwen3_vl.Qwen3DecoderConfig\nnum_layer: 4\nhidden_size: 8\n",
        "broken.yaml",
    )
    file = write(
        tmp_path,
        "# @package model\ndefaults:\n  - /qwen3_vl/qwen3_vl_tiny@_here_\n"
        "  - override /qwen3@foundation: broken\n  - _self_\nimage_projecter:\n  freeze: true\n",
    )
    lines = problem(config_file=file).splitlines()
    assert (
        f"{file}: model.image_projecter is not a key of Qwen3VLConfig; the closest is " in lines[0]
    )
    assert lines[0].endswith("image_projector")
    assert (
        f"{module}: model.foundation.num_layer is not a key of Qwen3DecoderConfig; "
        "the closest is num_layers" in lines
    )
    assert f"{module}: model.foundation.num_layers is missing" in lines


@pytest.mark.quick
def test_bad_names_suggest(tmp_path: Path) -> None:
    assert "the closest is qwen3_vl_tiny" in problem(model_name="qwen3_vl_tinny")
    assert "the closest is qwen3_vl_8b" in problem(model_name="qwen3-vl-8b")
    # A module's YAML is not a model.
    assert "there is no model qwen3_tiny" in problem(model_name="qwen3_tiny")
    assert "is not a .yaml file" in problem(config_file=tmp_path / "nope.yaml")
    assert "give one of" in problem()
    assert "give one of" in problem(model_name=TINY, config_file=tmp_path)
    file = write(
        tmp_path, "# @package model\ndefaults:\n  - /image_encoder@image_encoder: qwen3_vit_tny\n"
    )
    assert "which does not exist; the closest is qwen3_vit_tiny" in problem(config_file=file)
    assert "does not compose" in problem(config_file=write(tmp_path, "a: [1\n"))
    assert "a is not a key of a model file" in problem(config_file=write(tmp_path, "a: 1\n"))
    assert "model._target_ is missing" in problem(config_file=write(tmp_path, "{}\n"))
    assert "does not compose" in problem(config_file=write(tmp_path, "5\n"))
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"\x80\xff\x00")
    assert f"{file} does not compose: " in problem(config_file=file)


@pytest.mark.quick
def test_numbers_in_files_are_finite(tmp_path: Path) -> None:
    text = "# @package model\ndefaults:\n  - /qwen3_vl/qwen3_vl_tiny@_here_\n  - _self_\n"
    file = write(tmp_path, f"{text}foundation:\n  rotary_base: .inf\n")
    expected = f"{file}: model.foundation.rotary_base is inf, but should be a finite number"
    assert problem(config_file=file) == expected


@pytest.mark.quick
def test_settings_of_transformers_are_named_by_key(tmp_path: Path) -> None:
    """With the file that has them, mounted or not, however deep."""
    (tmp_path / "towers").mkdir()
    tower = write(
        tmp_path / "towers",
        "_target_: loongplug.models.hugging_face_encoder.HuggingFaceEncoderConfig\n"
        "model_type: vit\nsettings:\n  hidden_size: .nan\n",
        "vit.yaml",
    )
    file = write(
        tmp_path,
        "# @package model\ndefaults:\n  - towers@image_encoder: vit\n"
        "  - /image_projector@image_projector: mlp\n  - /llama@foundation: llama_tiny\n  - _self_\n"
        "_target_: loongplug.models.llava.LlavaConfig\nimage_token_id: null\n"
        "image_encoder:\n  settings:\n    sides:\n      - 2\n      - 3: 4\n        side: .inf\n",
    )
    key = "model.image_encoder.settings"
    assert problem(config_file=file).splitlines() == [
        f"{tower}: {key}.hidden_size is nan, but should be a finite number",
        f"{file}: {key}.sides[1] has the key 3, but keys should be text",
        f"{file}: {key}.sides[1].side is inf, but should be a finite number",
    ]


@pytest.mark.quick
@pytest.mark.parametrize("package", ["../x", ".x", "a..b", "a/b", ""])
def test_what_is_no_package_is_not_imported(package: str) -> None:
    message = problem(model_name=TINY, trusted_packages=[package])
    assert f"--trusted-packages names {package!r}, which is not a package" in message


# A config file is data, not code.


@pytest.mark.quick
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("os.system", "os.system is not in loongplug"),
        ("os", "os is not in loongplug"),
        ("loongplugged.Config", "is not in loongplug"),
        ("loongplug..models", "is not in loongplug"),
        ("loongplug.training.config.os.system", "does not exist"),
        ("loongplug.training.config.Path", "is not a frozen dataclass"),
        ("loongplug.training.config.compose_model", "is not a frozen dataclass"),
        ("loongplug.training.config.dataclass", "is not a frozen dataclass"),
        ("loongplug.models.family.Family", "but should be a loongplug.models.qwen3_vl."),
        (
            "loongplug.models.qwen3_vl.Qwen3VisionConfig",
            "should be a loongplug.models.qwen3_vl.Qwen3DecoderConfig",
        ),
        ("loongplug.models.qwen3_vl.Qwen3Config", "does not exist"),
        ("3", "is a dotted class name, not 3"),
    ],
)
def test_targets_that_are_refused(target: str, expected: str) -> None:
    message = problem(model_name=TINY, overrides=[f"model.foundation._target_={target}"])
    assert expected in message


@pytest.mark.quick
def test_root_target_is_held_to_the_same_rules() -> None:
    for target, expected in (
        ("os.system", "os.system is not in loongplug"),
        ("loongplug.data.microbatch.MediaInput", "describes no known model family"),
    ):
        assert expected in problem(model_name=TINY, overrides=[f"model._target_={target}"])


@pytest.mark.quick
def test_refused_package_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "side_effect.py"
    module.write_text(
        "import os\nos.environ['SIDE_EFFECT'] = '1'\n"
        "from loongplug.models.qwen3_vl import Qwen3DecoderConfig\n"
        "class Decoder(Qwen3DecoderConfig): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("SIDE_EFFECT", raising=False)
    override = "model.foundation._target_=side_effect.Decoder"
    assert "is not in loongplug" in problem(model_name=TINY, overrides=[override])
    # Hydra itself can be told to import a package, by its own key.
    file = write(tmp_path, "hydra:\n  searchpath: ['pkg://side_effect']\n")
    assert "hydra is not a key of a model file" in problem(config_file=file)
    assert "SIDE_EFFECT" not in os.environ

    config = compose_model(
        model_name=TINY, overrides=[override], trusted_packages=["side_effect"]
    ).config
    assert type(config.foundation).__name__ == "Decoder"
    assert os.environ.pop("SIDE_EFFECT") == "1"


@pytest.mark.parametrize(
    "content",
    [b"a: " + b"[" * 5000 + b"]" * 5000, b"a: &a [*a]\n"],
    ids=["nested", "within-itself"],
)
@pytest.mark.parametrize("mounted", [False, True])
def test_what_no_reader_of_yaml_can_build_is_one_sentence(
    tmp_path: Path, *, content: bytes, mounted: bool
) -> None:
    evil = tmp_path / "evil.yaml"
    evil.write_bytes(content)
    mounting = f"# @package model\ndefaults:\n  - /qwen3_vl/{TINY}@_here_\n  - /evil@foundation\n"
    file = write(tmp_path, mounting) if mounted else evil
    assert problem(config_file=file).startswith(f"{file} does not compose: ")


def test_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    text = (
        f"# @package model\ndefaults:\n  - /qwen3_vl/{TINY}@_here_\n  - _self_\n"
        "image_encoder:\n  deepstack_layers: &taps [0, 1]\n  num_layers: &n 3\n"
    )
    config = compose_model(config_file=write(tmp_path, text)).config
    assert config.image_encoder.deepstack_layers == (0, 1)
