"""The table of start-up rules: every rule fires on its own cases and on no valid run."""

import ast
import copy
import dataclasses
import importlib.util
import pkgutil
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import rule_cases
from command_lines import command_line, write_tokenizer
from rule_cases import (
    ADAPTERS,
    CASES,
    OMNI_OVERRIDES,
    OVERRIDES,
    OWN_LAYOUT,
    OWN_RANKS,
    QWEN2_5_OVERRIDES,
    WITH_EXPERTS,
)
from rule_cases.kinds import LAYOUT

from loongplug.hetero.modes import modes_of
from loongplug.models.architecture import TextArchitecture
from loongplug.models.lora import LoraSettings
from loongplug.models.qwen3_vl import Qwen3VLConfig
from loongplug.models.registry import family_of
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.models.text_decoders import MistralTextConfig
from loongplug.training import arguments, rules
from loongplug.training.config import compose_model
from loongplug.training.rules import RULES, violated_rules
from loongplug.training.rules.lora import lora_own_folder
from loongplug.training.rules.rule import rules_of
from loongplug.training.rules.start import hf_own_folder
from loongplug.training.rules.unsupported import UNSUPPORTED

pytestmark = pytest.mark.quick

Run = tuple[Namespace, Qwen3VLConfig]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A valid run's arguments and model as the rules get them."""
    return prepare(tmp_path_factory.mktemp("run"), model="qwen3_vl_tiny")


@pytest.fixture(scope="module")
def prepared_experts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same of a model with 8 experts, 2 per token."""
    return prepare(tmp_path_factory.mktemp("experts"), model="qwen3_vl_moe_tiny")


@pytest.fixture(scope="module")
def qwen2_5(prepared: Run) -> Any:
    """The model of the other family, with the token ids of the run's tokenizer."""
    known = prepared[1]
    ids = {name: getattr(known, name) for name in family_of(known).special_tokens}
    return dataclasses.replace(compose_model(model_name="qwen2_5_vl_tiny").config, **ids)


@pytest.fixture(scope="module")
def omni(prepared: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Namespace, Any]:
    """The same of a model that sees and hears, with a tokenizer of its special tokens."""
    composed, args = compose_model(model_name="qwen2_5_omni_tiny"), copy.copy(prepared[0])
    ids = {name: number for number, name in enumerate(composed.family.special_tokens, start=3)}
    tokens = {text: ids[name] for name, text in composed.family.special_tokens.items()}
    folder = tmp_path_factory.mktemp("omni") / "tokenizer"
    args.tokenizer_model = str(write_tokenizer(folder, tokens=tokens))
    return args, dataclasses.replace(composed.config, **ids)


def prepare(folder: Path, *, model: str) -> Run:
    seen: list[Run] = []

    def capture(args: Namespace, model: Any, **options: Any) -> list[str]:
        seen.append((copy.copy(args), model))
        return violated_rules(args, model, **options)

    with patch.object(arguments, "violated_rules", capture):
        arguments.parse_arguments(command_line(folder, model=model))
    return seen[0]


def violated(run: Run, *, model: Any = None, **changes: Any) -> list[str]:
    """Names of the rules violated once ``changes`` are made to the arguments."""
    args = copy.copy(run[0])
    for name, value in changes.items():
        assert hasattr(args, name), f"Megatron has no argument {name}"
        setattr(args, name, value)
    return names(violated_rules(args, model or run[1]))


def violated_by_model(run: Run, original: Any, overrides: list[str], *, tp: int) -> list[str]:
    model = changed(original, overrides)
    decided = {
        name: argument.value
        for name, argument in family_of(model).megatron_arguments(model).items()
    }
    layout = {"world_size": 4, "global_batch_size": 16, "tensor_model_parallel_size": tp}
    return violated(run, model=model, **decided, **layout)


def changed(model: Any, settings: list[str]) -> Any:
    """``model`` with ``key=value`` settings, as overrides make them."""
    for setting in settings:
        key, _, text = setting.partition("=")
        value = ast.literal_eval(text)
        part, _, name = key.rpartition(".")
        value = tuple(value) if isinstance(value, list) else value
        if part:
            name, value = part, dataclasses.replace(getattr(model, part), **{name: value})
        model = dataclasses.replace(model, **{name: value})
    return model


def names(lines: list[str]) -> list[str]:
    return [line.rpartition("[")[2].rstrip("]") for line in lines]


@pytest.mark.parametrize("rule", CASES)
def test_rule_fires_alone_and_leaves_its_neighbours(prepared: Run, rule: str) -> None:
    for cases, expected in zip(CASES[rule], ([rule], []), strict=True):
        for changes in cases:
            assert violated(prepared, **changes) == expected, changes


@pytest.mark.parametrize("rule", WITH_EXPERTS)
def test_expert_rule_fires_alone_and_leaves_its_neighbours(
    prepared_experts: Run, rule: str
) -> None:
    layout = {"world_size": 8, "global_batch_size": 16}
    for cases, expected in zip(WITH_EXPERTS[rule], ([rule], []), strict=True):
        for changes in cases:
            assert violated(prepared_experts, **(layout | changes)) == expected, changes


OF_MODELS = {"qwen3": OVERRIDES, "qwen2_5": QWEN2_5_OVERRIDES, "omni": OMNI_OVERRIDES}


@pytest.mark.parametrize(("of", "rule"), [(of, name) for of in OF_MODELS for name in OF_MODELS[of]])
def test_model_rule_fires_alone_and_leaves_its_neighbours(
    prepared: Run, qwen2_5: Any, omni: Any, of: str, rule: str
) -> None:
    run = omni if of == "omni" else prepared
    model = qwen2_5 if of == "qwen2_5" else run[1]
    for cases, expected in zip(OF_MODELS[of][rule], ([rule], []), strict=True):
        for tp, overrides in cases:
            found = violated_by_model(run, model, overrides, tp=tp)
            assert found == expected, (tp, overrides)


@pytest.mark.parametrize("rule", ADAPTERS)
def test_adapter_rule_fires_alone_and_leaves_its_neighbours(prepared: Run, rule: str) -> None:
    for cases, expected in zip(ADAPTERS[rule], ([rule], []), strict=True):
        for part, settings in cases:
            module = dataclasses.replace(getattr(prepared[1], part), lora=settings)
            model = dataclasses.replace(prepared[1], **{part: module})
            assert violated(prepared, model=model) == expected, settings
            adapters = {"save_lora": "adapters", "freeze_parameters": ["*"]}
            assert violated(prepared, model=model, **adapters) == expected


def test_a_decoder_s_adapters_drop_nothing_of_parts_of_rows(prepared: Run) -> None:
    """An encoder's may: its ranks have the same media."""
    rule = "context-parallel-adapters"
    for key, cp, dropout, expected in (
        ("foundation", 2, 0.1, [rule]),
        ("foundation", 2, 0.0, []),
        ("foundation", 1, 0.1, []),
        ("image_encoder", 2, 0.1, []),
        ("image_projector", 2, 0.1, []),
    ):
        lora = LoraSettings(rank=2, dropout=dropout)
        module = dataclasses.replace(getattr(prepared[1], key), lora=lora)
        model = dataclasses.replace(prepared[1], **{key: module})
        layout = {**LAYOUT, "context_parallel_size": cp}
        assert violated(prepared, model=model, **layout) == expected, (key, cp, dropout)


def test_adapters_have_a_folder_of_their_own(prepared: Run, tmp_path: Path) -> None:
    foundation = dataclasses.replace(prepared[1].foundation, lora=LoraSettings(rank=2))
    model = dataclasses.replace(prepared[1], foundation=foundation)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for lora, other, shared in (
        ("out", "out", {"save_hf", "save"}),
        ("out/../out/", "out", {"save_hf", "save"}),
        ("link", "out", {"save_hf", "save"}),
        ("out", "out/more", {"save_hf", "save"}),
        ("out/lora", "out", {"save_hf"}),  # a checkpoint's folder keeps what is in it
        ("out-lora", "out", set()),
    ):
        for argument in ("save_hf", "save"):
            folders = {"save_lora": f"{tmp_path}/{lora}", argument: f"{tmp_path}/{other}"}
            expected = ["lora-own-folder"] if argument in shared else []
            folders["freeze_parameters"] = ["*"]
            assert violated(prepared, model=model, **folders) == expected, folders


def test_adapters_alone_are_not_saved_where_other_weights_train(prepared: Run) -> None:
    rule = "lora-beside-weights"
    foundation = dataclasses.replace(prepared[1].foundation, lora=LoraSettings(rank=2))
    frozen, *others = (
        dataclasses.replace(
            prepared[1],
            foundation=foundation,
            **{
                key: dataclasses.replace(getattr(prepared[1], key), freeze=True)
                for key in ("image_encoder", "image_projector")[:number]
            },
        )
        for number in (2, 1, 0)
    )
    for model in others:
        assert violated(prepared, model=model, save_lora="a") == [rule]
        assert violated(prepared, model=model, save_lora="a", save_hf="b") == []
        assert violated(prepared, model=model) == []
        patterns = ["image_*"]
        assert violated(prepared, model=model, save_lora="a", freeze_parameters=patterns) == []
    assert violated(prepared, model=frozen, save_lora="a") == []
    norms = ["text_decoder.*norm*"]
    assert violated(prepared, model=frozen, save_lora="a", train_parameters=norms) == [rule]


def test_an_export_keeps_out_of_what_the_run_reads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    folders = ("load_hf", "load_lora", "load", "tokenizer_model", "media_root")
    blends = ("train_data_path", "valid_data_path", "data_path")
    for name in (*folders, *blends):
        for place, shared in (("out", True), ("link/in/it", True), ("", False), ("other", False)):
            path = f"{tmp_path}/{place}"
            given = ["0.5", path] if name in blends else path
            flag = f"--{name.replace('_', '-')}"
            args = Namespace(save_hf=f"{tmp_path}/out", save_lora=None, **{name: given})
            expected = f"{flag} {path} with --save-hf {tmp_path}/out" if shared else None
            assert hf_own_folder(args, None) == expected
            args = Namespace(save_hf=None, save_lora=f"{tmp_path}/out", **{name: given})
            expected = f"{flag} {path} with --save-lora {tmp_path}/out" if shared else None
            assert lora_own_folder(args, None) == expected


def test_experts_are_no_dense_linears_to_adapters(prepared_experts: Run) -> None:
    args, model = prepared_experts
    for target, expected in (("mlp.linear_fc1", ["lora-targets"]), ("linear_fc1", [])):
        lora = LoraSettings(rank=2, target_modules=(target,))
        foundation = dataclasses.replace(model.foundation, lora=lora)
        adapted = dataclasses.replace(model, foundation=foundation)
        assert names(violated_rules(args, adapted)) == expected


def test_the_norm_is_recomputed_in_one_way(prepared_experts: Run) -> None:
    overlap = {"overlap_moe_expert_parallel_comm": True, "bf16": True, "world_size": 2}
    overlap |= {"expert_model_parallel_size": 2, "recompute_granularity": "selective"}
    for modules, expected in (
        (["a2a_overlap_mlp", "layernorm"], True),
        (["layernorm"], False),
        (["a2a_overlap_mlp"], False),
    ):
        found = violated(prepared_experts, recompute_modules=modules, **overlap)
        assert ("decoder-recompute-nodes-alone" in found) == expected


def test_adapters_of_shared_experts_stay_beside_whole_linears(prepared_experts: Run) -> None:
    _, model = prepared_experts
    beside = {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 48}
    beside |= {"world_size": 8, "global_batch_size": 16, "sequence_parallel": True}
    for target, tp, expected in (
        ("linear_fc2", 2, ["lora-shared-experts"]),
        ("linear_fc2", 1, []),
        ("linear_qkv", 2, []),
    ):
        lora = LoraSettings(rank=2, target_modules=(target,))
        adapted = dataclasses.replace(
            model, foundation=dataclasses.replace(model.foundation, lora=lora)
        )
        found = violated(prepared_experts, model=adapted, tensor_model_parallel_size=tp, **beside)
        assert found == expected, (target, tp)


def test_embeddings_have_one_learning_rate(prepared: Run) -> None:
    model = changed(prepared[1], ["foundation.lr_mult=0.5"])
    assert violated(prepared, model=model, decoupled_lr=1e-4) == ["lr-mult-decoupled"]
    assert violated(prepared, decoupled_lr=1e-4) == []


def test_wandb_without_its_package(prepared: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask for ``--save``, which is given."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert violated(prepared, wandb_project="charts", save="/run") == ["wandb"]


def with_plain_rope(run: Run, **more: Any) -> Any:
    """The run's model with a decoder of text alone, of the same sizes."""
    text = run[1].foundation
    sizes = {each.name: getattr(text, each.name) for each in dataclasses.fields(TextArchitecture)}
    return dataclasses.replace(run[1], foundation=MistralTextConfig(**sizes, **more))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"low_freq_factor": 3.9}, None),
        ({"low_freq_factor": 4.0}, "has high_freq_factor 4.0 and low_freq_factor 4.0: "),
        ({"factor": 0.0}, "has factor 0.0: "),
        (
            {"low_freq_factor": -1.0, "original_max_position_embeddings": 0},
            "has low_freq_factor -1.0, original_max_position_embeddings 0: ",
        ),
    ],
)
def test_scaling_of_rope_has_an_order(
    prepared: Run, changes: dict[str, float], said: str | None
) -> None:
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling: Any = llama | {"original_max_position_embeddings": 8192} | changes
    model = with_plain_rope(prepared, rope_scaling=Llama3Scaling(**scaling))
    found = violated_rules(prepared[0], model)
    assert names(found) == ([] if said is None else ["rope-scaling"])
    assert said is None or found[0].startswith(f"rope_scaling {said}")


@pytest.mark.parametrize(("shorter", "allowed"), [(None, True), (0, True), (1, False)])
def test_windows_are_not_shorter_than_the_row(
    prepared: Run, shorter: int | None, allowed: bool
) -> None:
    length = prepared[0].seq_length
    window = None if shorter is None else length - shorter
    found = violated_rules(prepared[0], with_plain_rope(prepared, sliding_window=window))
    assert names(found) == ([] if allowed else ["sliding-window"])
    assert allowed or found[0].startswith(
        f"sliding_window {length - 1} is shorter than --seq-length {length}: "
    )


def test_texts_with_dynamic_rope_are_not_longer_than_its_plain_part(prepared: Run) -> None:
    length = prepared[0].seq_length
    for longest, factor in ((length, 2.0), (length - 1, None), (length - 1, 2.0)):
        model = with_plain_rope(prepared, dynamic_rope_factor=factor)
        text = dataclasses.replace(model.foundation, max_position_embeddings=longest)
        found = violated_rules(prepared[0], dataclasses.replace(model, foundation=text))
        refused = longest < length and factor is not None
        assert names(found) == (["dynamic-rope"] if refused else [])
    said = f"max_position_embeddings {length - 1} is shorter than --seq-length {length}, with"
    assert found[0].startswith(said)


def test_a_budget_below_one_row_is_refused_in_one_sentence(prepared: Run) -> None:
    (found,) = violated_rules(prepared[0], changed(prepared[1], ["image_encoder.joined_rows=0"]))
    assert found == (
        "model.image_encoder.joined_rows is 0: a pass through an encoder has at least one unit, "
        "however small the budget; give 1, with which each unit is encoded by itself, or more, or "
        "leave it out [joined-rows]"
    )


@pytest.mark.parametrize(
    ("mode", "tp", "pp", "encoder_tp", "allowed"),
    [
        ("enable_full_hetero_dp", 1, 2, 2, True),
        ("enable_full_hetero_dp", 2, 2, 4, True),
        ("enable_full_hetero_dp", 1, 4, 2, True),
        ("enable_full_hetero_dp", 1, 4, 3, False),
        ("enable_full_hetero_dp", 1, 1, 2, False),
        ("enable_encoder_hetero_dp", 1, 2, 2, False),
        (None, 1, 2, 2, False),
    ],
)
def test_an_encoder_on_several_stages_takes_full_separation(
    prepared: Run, mode: str | None, tp: int, pp: int, encoder_tp: int, allowed: bool
) -> None:
    sizes = [
        f"image_encoder.tensor_model_parallel_size={encoder_tp}",
        # divided by any of them
        *("image_encoder.num_attention_heads=12", "image_encoder.hidden_size=96"),
        "image_encoder.ffn_hidden_size=192",
    ]
    changes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    changes |= {"world_size": 8, "global_batch_size": 16, **({mode: True} if mode else {})}
    found = violated(prepared, model=changed(prepared[1], sizes), **changes)
    assert found == ([] if allowed else ["encoder-layout"])


STREAMED = {"enable_full_hetero_dp": True, "full_hetero_dp_schedule": "streamed"}


def test_encoders_over_several_stages_do_not_stream(prepared: Run) -> None:
    for encoder_tp, expected in ((4, ["streamed-stages"]), (2, []), (1, [])):
        model = changed(prepared[1], [f"image_encoder.tensor_model_parallel_size={encoder_tp}"])
        layout = {"world_size": 8, "global_batch_size": 16, "pipeline_model_parallel_size": 2}
        changes = {**layout, "tensor_model_parallel_size": 2, **STREAMED}
        assert violated(prepared, model=model, **changes) == expected
        del changes["full_hetero_dp_schedule"]
        assert violated(prepared, model=model, **changes) == []


def test_of_several_encoders_the_one_with_most_work_streams(omni: Any) -> None:
    """By its size, for a token that it gives the text. The others are as in a separated run."""
    args = Namespace(**{**vars(omni[0]), **STREAMED, "offload_encoder_activations": True})
    deep = changed(omni[1], ["audio_encoder.num_layers=40"])
    for model, most in ((omni[1], "image_encoder"), (deep, "audio_encoder")):
        found = modes_of(args, model)
        assert {name: mode.fills_bubbles for name, mode in found.items()} == {
            name: name == most for name in model.encoders
        }
        (other,) = found.keys() - {most}
        separated = Namespace(**{**vars(args), "full_hetero_dp_schedule": "separated"})
        assert found[other] == modes_of(separated, model)[other]
        layout = {"world_size": 8, "global_batch_size": 16, "pipeline_model_parallel_size": 2}
        for name in model.encoders:
            wide = changed(model, [f"{name}.tensor_model_parallel_size=4"])
            expected = ["streamed-stages"] if name == most else []
            changes = {**layout, "tensor_model_parallel_size": 2, **STREAMED}
            assert violated(omni, model=wide, **changes) == expected


def test_encoders_of_several_modes_do_not_stream(omni: Any) -> None:
    assert violated(omni, model=omni[1], **STREAMED) == []
    for mode in ("uniform", "encoder_hetero_dp"):
        model = changed(omni[1], [f"audio_encoder.mode='{mode}'"])
        assert violated(omni, model=model, **STREAMED) == ["streamed-encoders"]
        assert violated(omni, model=model, enable_full_hetero_dp=True) == []


def test_what_is_said_of_an_encoder_in_another_mode(
    omni: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, with the encoder, its mode and the reason; and where a run goes on without."""
    model = changed(omni[1], ["audio_encoder.mode='uniform'"])
    args = Namespace(**{**vars(omni[0]), **STREAMED})
    (line,) = violated_rules(args, model)
    why = (
        "--full-hetero-dp-schedule streamed with model.audio_encoder: uniform: an encoder that "
        "streams works by a plan, and one in another mode works at times that this plan does not "
        "know"
    )
    cure = "give every encoder full separation, or use --full-hetero-dp-schedule separated"
    assert line == f"{why}; {cure} [streamed-encoders]"
    open_yet = {"full_hetero_dp_schedule": "auto", "pipeline_model_parallel_size": 2, "rank": 0}
    args = Namespace(**{**vars(args), **open_yet})
    arguments.settle_schedule(args, model)
    assert args.full_hetero_dp_schedule == "separated"
    said = f"Encoders work before the decoder's schedule and behind it: {why}.\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("layout", "queues", "refused"),
    [
        ((1, 2), None, True),  # a run sets 1
        ((1, 2), "3", True),
        ((1, 2), "4", False),
        ((1, 4), "7", True),
        ((1, 4), "8", False),
        ((2, 4), "7", True),
        ((2, 4), "8", False),
        ((2, 1), "1", False),  # nothing streams
    ],
)
def test_a_device_has_a_queue_for_each_stream(
    prepared: Run,
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[int, int],
    queues: str | None,
    refused: bool,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    tp, pp = layout
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    changes = {**LAYOUT, **sizes, "num_layers": 8, **STREAMED}
    assert "streamed-queues" not in violated(prepared, **changes)
    found = violated(prepared, target_device="cuda", **changes)
    assert ("streamed-queues" in found) == refused


@pytest.mark.parametrize(("replicas", "refused"), [(12, False), (13, True)])
def test_a_rank_has_a_stream_for_each_communicator(
    prepared: Run, replicas: int, refused: bool
) -> None:
    """Of an encoder on a rank of its own: there and back for each replica of the decoder."""
    model = changed(prepared[1], [f"image_encoder.rank_offset={replicas}"])
    layout = {"ranks": replicas + 1, "world_size": replicas, "global_batch_size": 2 * replicas}
    assert violated(prepared, model=model, **layout) == []
    found = violated(prepared, model=model, target_device="cuda", **layout)
    assert found == (["communicators"] if refused else [])


@pytest.mark.parametrize(
    ("given", "changes", "settled", "why"),
    [
        ("auto", {"pipeline_model_parallel_size": 2}, "streamed", ""),
        ("streamed", {"pipeline_model_parallel_size": 2}, "streamed", ""),
        ("separated", {"pipeline_model_parallel_size": 2}, "separated", ""),
        ("auto", {}, "separated", ""),
        ("auto", {"pipeline_model_parallel_size": 2, "target_device": "cuda"}, "separated", ""),
        (
            "auto",
            {"pipeline_model_parallel_size": 2, "enable_full_hetero_dp": False},
            "separated",
            "",
        ),
        ("streamed", {}, "separated", "a pipeline of one stage has no bubble"),
        (
            "auto",
            {"pipeline_model_parallel_size": 2, "offload_encoder_state": True},
            "separated",
            "--offload-encoder-state: the encoder works all through the decoder's schedule",
        ),
    ],
)
def test_why_nothing_is_streamed_is_said_once(
    prepared: Run,
    capsys: pytest.CaptureFixture[str],
    given: str,
    changes: dict[str, Any],
    settled: str,
    why: str,
) -> None:
    for rank in (0, 1):
        full = {"enable_full_hetero_dp": True, "full_hetero_dp_schedule": given, "rank": rank}
        args = Namespace(**{**vars(prepared[0]), **full, **changes})
        arguments.settle_schedule(args, prepared[1])
        assert args.full_hetero_dp_schedule == settled
    said = capsys.readouterr().out
    assert (why in said) if why else not said
    assert said.count("\n") == bool(why)


@pytest.mark.parametrize("rule", OWN_LAYOUT)
def test_own_layout_rule_fires_with_an_encoder_layout_only(prepared: Run, rule: str) -> None:
    own = changed(prepared[1], ["image_encoder.tensor_model_parallel_size=1"])
    for cases, expected in zip(OWN_LAYOUT[rule], ([rule], []), strict=True):
        for changes in cases:
            assert violated(prepared, model=own, **changes) == expected, changes
            assert violated(prepared, **changes) == [], changes


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    all_cases = [CASES, WITH_EXPERTS, OVERRIDES, QWEN2_5_OVERRIDES, OMNI_OVERRIDES, OWN_LAYOUT]
    with_bad_case = {name for cases in all_cases for name, (bad, _) in cases.items() if bad}
    with_bad_case |= {
        *ADAPTERS,
        "lora-beside-weights",
        "lr-mult-decoupled",
        "wandb",
        "lora-own-folder",
        "lora-shared-experts",
    }
    with_bad_case |= {"context-parallel-adapters"}
    with_bad_case |= {"rope-scaling", "sliding-window", "dynamic-rope"}
    with_bad_case |= {"streamed-encoders", "streamed-stages", "streamed-queues"}
    with_bad_case |= {*OWN_RANKS, "own-ranks-whole"}  # test_own_ranks_rules.py
    assert {rule.name for rule in RULES} == with_bad_case


def test_every_file_of_rules_is_in_the_table_and_has_its_cases() -> None:
    files = {module.name for module in pkgutil.iter_modules(rules.__path__)} - {"rule"}
    tables = {name for name in files if rules_of(getattr(rules, name)) in rules.SUBJECTS.values()}
    assert tables == files
    assert files | {"kinds"} == {
        module.name for module in pkgutil.iter_modules(rule_cases.__path__)
    }


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_flags_are_named_as_megatron_names_them(prepared: Run, name: str) -> None:
    args = copy.copy(prepared[0])
    setattr(args, name, 1)
    (line,) = violated_rules(args, prepared[1])
    assert line.startswith(f"--{name.replace('_', '-')}: ")


def test_tokenizer_is_held_against_the_model(prepared: Run, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", tokens={"<|image_pad|>": 5, "<|video_pad|>": 6})
    args = copy.copy(prepared[0])
    args.tokenizer_model = str(other)
    (line,) = violated_rules(args, prepared[1])
    assert "has no token <|vision_start|> for model.vision_start_token_id" in line
    model = dataclasses.replace(prepared[1], image_token_id=7)
    args.tokenizer_model = str(write_tokenizer(tmp_path / "mine"))
    (line,) = violated_rules(args, model)
    assert "model.image_token_id is 7, but the tokenizer's <|image_pad|> is 5" in line
    for none in (-1, model.foundation.vocab_size):
        (line,) = violated_rules(args, dataclasses.replace(prepared[1], image_token_id=none))
        assert f"model.image_token_id is {none}, but the model has ids 0 to " in line
    (tmp_path / "mine" / "tokenizer.json").write_text("{")
    (line,) = violated_rules(args, model)
    assert "is not a tokenizer of Hugging Face's format" in line


def test_all_violations_are_reported_in_the_table_s_order(prepared: Run) -> None:
    found = violated(prepared, fp16=True, lr=None, ckpt_format="torch")
    assert found == ["required-flags", "precision", "checkpoint-format"]


def test_a_conversion_is_asked_nothing_about_training(prepared: Run) -> None:
    args = copy.copy(prepared[0])
    args.train_data_path, args.video_fps, args.fp16 = None, 0.0, True
    found = (names(violated_rules(args, prepared[1], training=training)) for training in (1, 0))
    assert list(found) == [["data-given", "video-rate", "precision"], ["precision"]]


def test_folders_of_rows_are_data_without_energon(prepared: Run, tmp_path: Path) -> None:
    args, model = prepared
    for folder, file in (("parquet", "a.parquet"), ("saved", "state.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
        given = Namespace(**{**vars(args), "train_data_path": [str(tmp_path / folder)]})
        assert violated_rules(given, model) == []
