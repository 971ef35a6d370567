"""What is refused, before any groups are made, where encoders have ranks of their own."""

import copy
import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from command_lines import command_line, write_tokenizer
from rule_cases.own_ranks import (
    APART,
    OWN_RANKS,
    OWN_RANKS_OMNI,
    OWN_RANKS_OVERRIDES,
    PLACED,
    STAGES,
)
from test_rules import Run, changed, names, prepare

from loongplug.checkpoint.settings_notes import (
    ARCHITECTURE_FILE,
    check_architecture,
    for_any_layout,
    read_architecture,
    write_note,
)
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.models.registry import family_of
from loongplug.training.arguments import parse_arguments
from loongplug.training.config import compose_model, to_yaml_data
from loongplug.training.rules import own_ranks, violated_rules
from loongplug.training.rules.rule import ranks_apart as count_of

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A valid run's arguments and model as the rules get them."""
    return prepare(tmp_path_factory.mktemp("run"), model="qwen3_vl_tiny")


@pytest.fixture(scope="module")
def omni(prepared: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Namespace, Any]:
    """The same of a model that sees and hears."""
    composed, args = compose_model(model_name="qwen2_5_omni_tiny"), copy.copy(prepared[0])
    ids = {name: number for number, name in enumerate(composed.family.special_tokens, start=3)}
    tokens = {text: ids[name] for name, text in composed.family.special_tokens.items()}
    folder = tmp_path_factory.mktemp("omni") / "tokenizer"
    args.tokenizer_model = str(write_tokenizer(folder, tokens=tokens))
    return args, dataclasses.replace(composed.config, **ids)


def violated(run: tuple[Namespace, Any], model: Any, changes: dict[str, Any]) -> list[str]:
    """The lines of the rules, for 8 ranks of the decoder unless ``changes`` say otherwise."""
    args = copy.copy(run[0])
    for name, argument in family_of(model).megatron_arguments(model).items():
        setattr(args, name, argument.value)
    for name, value in {**PLACED, **changes}.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    return violated_rules(args, model)


@pytest.mark.parametrize("rule", OWN_RANKS)
def test_rule_fires_alone_with_an_encoder_apart(prepared: Run, rule: str) -> None:
    model = changed(prepared[1], [*APART])
    for cases, expected in zip(OWN_RANKS[rule], ([rule], []), strict=True):
        for changes in cases:
            assert names(violated(prepared, model, changes)) == expected, changes


def test_rules_have_nothing_to_say_where_no_encoder_lies_apart(prepared: Run) -> None:
    for bad, _ in OWN_RANKS.values():
        for changes in bad:
            found = names(violated(prepared, prepared[1], changes))
            assert not [name for name in found if name.startswith("own-ranks")], changes


@pytest.mark.parametrize("rule", [*OWN_RANKS_OVERRIDES, *OWN_RANKS_OMNI])
def test_model_rule_fires_alone(prepared: Run, omni: Any, rule: str) -> None:
    for table, run in ((OWN_RANKS_OVERRIDES, prepared), (OWN_RANKS_OMNI, omni)):
        for cases, expected in zip(table.get(rule, ([], [])), ([rule], []), strict=True):
            for ranks, overrides in cases:
                found = names(violated(run, changed(run[1], overrides), {"ranks": ranks}))
                assert found == expected, (ranks, overrides)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (9, "9 ranks with rank_offset 8 and 2 ranks of encoders: expected 10: "),
        (11, "11 ranks with rank_offset 8 and 2 ranks of encoders: expected 10: "),
        (1, "1 rank with rank_offset 8 and 2 ranks of encoders: expected 10: "),
    ],
)
def test_too_few_and_too_many_ranks_are_told_how_many(prepared: Run, ranks: int, said: str) -> None:
    model = changed(prepared[1], [*APART])
    layout = {"ranks": ranks, "world_size": ranks - count_of(model), "global_batch_size": 126}
    for sizes in ({}, {"tensor_model_parallel_size": 2}):  # 7 ranks are no whole replicas
        (line,) = violated(prepared, model, {**layout, **sizes})
        assert line.startswith(said)


def test_only_the_decoder_s_ranks_make_up_its_replicas(prepared: Run) -> None:
    model = changed(prepared[1], ["image_encoder.rank_offset=7"])
    changes = {"ranks": 8, "world_size": 7, "tensor_model_parallel_size": 2}
    (line,) = violated(prepared, model, changes)
    assert line.startswith("the decoder's 7 ranks do not divide by tp 2 x pp 1 x cp 1 = 2: ")


def test_placement_names_the_modules_and_ranks(omni: Any) -> None:
    found = []
    for overrides in (
        ["image_encoder.rank_offset=8", "audio_encoder.rank_offset=8"],
        ["image_encoder.rank_offset=8", "audio_encoder.rank_offset=10"],
    ):
        found += violated(omni, changed(omni[1], overrides), {})
    assert "'audio_encoder'" in found[0]
    assert "share rank 8: " in found[0]
    assert found[1].startswith("no module lies on rank 9: ")


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize(("size", "refused"), [(1, False), (2, True), (None, False)])
def test_an_encoder_of_transformers_stays_whole(
    prepared: Run, monkeypatch: pytest.MonkeyPatch, kind: str, size: int | None, refused: bool
) -> None:
    encoder: Any = object.__new__(HuggingFaceEncoderConfig)
    sizes = {f"{each}_model_parallel_size": 1 for each in ("tensor", "pipeline")}
    sizes[f"{kind}_model_parallel_size"] = size
    for name, value in {"rank_offset": 8, **sizes}.items():
        object.__setattr__(encoder, name, value)
    monkeypatch.setattr(own_ranks, "lying_apart", lambda model: {"image_encoder": encoder})
    found = own_ranks.own_ranks_whole(prepared[0], prepared[1])
    expected = f"model.image_encoder.{kind}_model_parallel_size 2" if refused else None
    assert found == expected


def test_a_model_is_put_together_again() -> None:
    placed = changed(
        compose_model(model_name="qwen2_5_omni_tiny").config,
        [
            *("image_encoder.rank_offset=4", "image_encoder.tensor_model_parallel_size=2"),
            *("image_encoder.pipeline_model_parallel_size=2", "image_encoder.stage_layers=[2,1]"),
            *("audio_encoder.tensor_model_parallel_size=1", "image_encoder.freeze=True"),
        ],
    )
    whole = placed.beside_the_decoder()
    own = {"tensor_model_parallel_size": None, "pipeline_model_parallel_size": 1}
    assert whole.image_encoder == dataclasses.replace(
        placed.image_encoder, rank_offset=None, stage_layers=None, **own
    )
    assert whole.audio_encoder is placed.audio_encoder  # which lies beside the decoder as it is
    assert whole.image_encoder.freeze


def test_a_checkpoint_is_of_the_same_model_wherever_its_encoders_lay(tmp_path: Path) -> None:
    config = compose_model(model_name="qwen3_vl_tiny").config
    placed = changed(config, [*APART, *STAGES[1:], "image_encoder.stage_layers=[2,1]"])
    write_note(tmp_path / ARCHITECTURE_FILE, to_yaml_data(placed))
    check_architecture(tmp_path, to_yaml_data(config))
    noted = for_any_layout(read_architecture(tmp_path))
    of_its_place = {"rank_offset", "data_parallel_size", "stage_layers"}
    assert not of_its_place & noted["model"]["image_encoder"].keys()
    older = to_yaml_data(config)
    del older["model"]["image_encoder"]["data_parallel_size"]  # as before there was such a key
    (tmp_path / "older").mkdir()
    write_note(tmp_path / "older" / ARCHITECTURE_FILE, older)
    check_architecture(tmp_path / "older", to_yaml_data(config))


def test_a_conversion_takes_no_notice_of_where_encoders_lie(tmp_path: Path) -> None:
    line = [*command_line(tmp_path, model="qwen3_vl_tiny"), "model.image_encoder.rank_offset=1"]
    parsed = parse_arguments(line, training=False)
    assert parsed.model.image_encoder.rank_offset is None
    assert parsed.args.world_size == 1
    with pytest.raises(ValueError, match=r"1 rank with rank_offset 1 .* expected 2"):
        parse_arguments(line)
