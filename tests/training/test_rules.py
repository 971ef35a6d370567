"""The table of start-up rules: every rule fires on its own cases and on no valid run."""

import ast
import copy
import dataclasses
import pkgutil
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import rule_cases
from command_lines import command_line, write_tokenizer
from rule_cases.hetero import APART
from rule_cases.kinds import LAYOUT, Case

from loongplug.hetero.modes import modes_of
from loongplug.models.architecture import TextArchitecture
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.models.lora import LoraSettings
from loongplug.models.registry import family_of
from loongplug.models.rope_settings import Llama3Scaling
from loongplug.models.text_decoders import MistralTextConfig
from loongplug.training import arguments, rules
from loongplug.training.config import compose_model
from loongplug.training.rules import RULES, hetero, violated_rules
from loongplug.training.rules.folders import own_folder
from loongplug.training.rules.rule import ranks_apart, rules_of

pytestmark = pytest.mark.quick

Run = tuple[Namespace, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Valid runs of each kind of case, as the rules get them."""
    args, dense = prepare(tmp_path_factory.mktemp("dense"), model="qwen3_vl_tiny")
    experts, of_experts = prepare(tmp_path_factory.mktemp("experts"), model="qwen3_vl_moe_tiny")
    vars(experts).update(LAYOUT)
    ids = {name: getattr(dense, name) for name in family_of(dense).special_tokens}
    qwen2_5 = dataclasses.replace(compose_model(model_name="qwen2_5_vl_tiny").config, **ids)
    # A model that sees and hears, with a tokenizer of its special tokens.
    omni, hears = compose_model(model_name="qwen2_5_omni_tiny"), copy.copy(args)
    ids = {name: number for number, name in enumerate(omni.family.special_tokens, start=3)}
    tokens = {text: ids[name] for name, text in omni.family.special_tokens.items()}
    folder = tmp_path_factory.mktemp("omni") / "tokenizer"
    hears.tokenizer_model = str(write_tokenizer(folder, tokens=tokens))
    return {
        "dense": (args, dense),
        "experts": (experts, of_experts),
        "qwen2_5": (args, qwen2_5),
        "omni": (hears, dataclasses.replace(omni.config, **ids)),
    }


@pytest.fixture(scope="module")
def prepared(runs: dict[str, Run]) -> Run:
    """The run of a dense model."""
    return runs["dense"]


@pytest.fixture(scope="module")
def omni(runs: dict[str, Run]) -> Run:
    """The run of a model that sees and hears."""
    return runs["omni"]


def prepare(folder: Path, *, model: str) -> Run:
    seen: list[Run] = []

    def capture(args: Namespace, model: Any, **options: Any) -> list[str]:
        seen.append((copy.copy(args), model))
        return violated_rules(args, model, **options)

    with patch.object(arguments, "violated_rules", capture):
        arguments.parse_arguments(command_line(folder, model=model))
    return seen[0]


def refused(run: Run, *, model: Any = None, **changes: Any) -> list[str]:
    """What the rules say once ``changes`` are made to the arguments, and overrides to the model."""
    args = copy.copy(run[0])
    model = changed(model or run[1], changes.pop("model_overrides", ()))
    changes = {
        **{n: each.value for n, each in family_of(model).megatron_arguments(model).items()},
        **changes,
    }
    for name, value in changes.items():
        assert hasattr(args, name), f"Megatron has no argument {name}"
        setattr(args, name, value)
    return violated_rules(args, model)


def violated(run: Run, *, model: Any = None, **changes: Any) -> list[str]:
    """Names of the rules that say something."""
    return names(refused(run, model=model, **changes))


def of_case(case: Case) -> dict[str, Any]:
    """What :func:`refused` takes."""
    return {"model_overrides" if name == "model" else name: case[name] for name in case}


def changed(model: Any, settings: Any) -> Any:
    """``model`` with ``key=value`` settings, as overrides make them."""
    for setting in settings:
        key, _, text = setting.partition("=")
        value = ast.literal_eval(text)
        part, _, name = key.rpartition(".")
        value = tuple(value) if isinstance(value, list) else value
        value = LoraSettings(**value) if name == "lora" else value
        if part:
            name, value = part, dataclasses.replace(getattr(model, part), **{name: value})
        model = dataclasses.replace(model, **{name: value})
    return model


def names(lines: list[str]) -> list[str]:
    return [line.rpartition("[")[2].rstrip("]") for line in lines]


@pytest.mark.parametrize(("run", "rule", "bad", "good"), rule_cases.CASES)
def test_rule_fires_alone_and_leaves_its_neighbours(
    runs: dict[str, Run], run: str, rule: str, bad: list[Case], good: list[Case]
) -> None:
    for cases, expected in ((bad, [rule]), (good, [])):
        for case in cases:
            assert violated(runs[run], **of_case(case)) == expected, case


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
            expected = ["own-folder"] if argument in shared else []
            folders["freeze_parameters"] = ["*"]
            assert violated(prepared, model=model, **folders) == expected, folders


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
            assert own_folder(args, None) == expected
            args = Namespace(save_hf=None, save_lora=f"{tmp_path}/out", **{name: given})
            expected = f"{flag} {path} with --save-lora {tmp_path}/out" if shared else None
            assert own_folder(args, None) == expected


def test_the_norm_is_recomputed_in_one_way(runs: dict[str, Run]) -> None:
    overlap = {"overlap_moe_expert_parallel_comm": True, "bf16": True, "world_size": 2}
    overlap |= {"expert_model_parallel_size": 2, "recompute_granularity": "selective"}
    for modules, expected in (
        (["a2a_overlap_mlp", "layernorm"], True),
        (["layernorm"], False),
        (["a2a_overlap_mlp"], False),
    ):
        found = violated(runs["experts"], recompute_modules=modules, **overlap)
        assert ("decoder-recompute-nodes-alone" in found) == expected


def with_plain_rope(run: Run, **more: Any) -> Any:
    """The run's model with a decoder of text alone, of the same sizes."""
    text = run[1].foundation
    sizes = {each.name: getattr(text, each.name) for each in dataclasses.fields(TextArchitecture)}
    return dataclasses.replace(run[1], foundation=MistralTextConfig(**sizes, **more))


@pytest.mark.parametrize(
    ("name", "more"),
    [("sliding_window", {}), ("max_position_embeddings", {"dynamic_rope_factor": 2.0})],
)
def test_rows_are_not_longer_than_what_the_decoder_attends_to(
    prepared: Run, name: str, more: dict[str, float]
) -> None:
    length = prepared[0].seq_length
    for bound, asked in ((length, more), (length - 1, more), (length - 1, {})):
        text = dataclasses.replace(with_plain_rope(prepared, **asked).foundation, **{name: bound})
        found = violated_rules(prepared[0], dataclasses.replace(prepared[1], foundation=text))
        refused = bound < length and (asked == more)
        assert names(found) == (["longest-row"] if refused else [])
        assert not refused or found[0].startswith(
            f"{name} {bound} is shorter than --seq-length {length}: "
        )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, []),
        ({"low_freq_factor": 4.0}, ["decoder-shape"]),
        ({"factor": 0.0}, ["positive-sizes"]),
    ],
)
def test_scaling_of_rope_has_an_order(
    prepared: Run, changes: dict[str, float], refused: list[str]
) -> None:
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling: Any = llama | {"original_max_position_embeddings": 8192} | changes
    model = with_plain_rope(prepared, rope_scaling=Llama3Scaling(**scaling))
    assert names(violated_rules(prepared[0], model)) == refused


STREAMED = {"enable_full_hetero_dp": True, "full_hetero_dp_schedule": "streamed"}


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
        ((1, 4), "7", True),
        ((1, 4), "8", False),
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


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    with_bad_case = {rule for _, rule, bad, _ in rule_cases.CASES if bad}
    with_bad_case |= {"longest-row", "streamed-queues"}
    assert {rule.name for rule in RULES} == with_bad_case


def test_every_file_of_rules_is_in_the_table() -> None:
    files = {module.name for module in pkgutil.iter_modules(rules.__path__)} - {"rule"}
    assert {rules_of(getattr(rules, name)) for name in files} == set(rules.SUBJECTS.values())


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
    args, model = copy.copy(prepared[0]), prepared[1]
    args.train_data_path, args.lr, args.ckpt_format = None, None, "torch"
    found = [names(violated_rules(args, model, training=training)) for training in (True, False)]
    assert found == [
        ["required-flags", "data-given", "values"],
        ["required-flags", "values"],  # a conversion
    ]


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
    layout = {"ranks": ranks, "world_size": ranks - ranks_apart(model), "global_batch_size": 126}
    for sizes in ({}, {"tensor_model_parallel_size": 2}):  # 7 ranks are no whole replicas
        (line,) = refused(prepared, model=model, **layout, **sizes)
        assert line.startswith(said)


def test_only_the_decoder_s_ranks_make_up_its_replicas(prepared: Run) -> None:
    model = changed(prepared[1], ["image_encoder.rank_offset=7"])
    changes = {"ranks": 8, "world_size": 7, "tensor_model_parallel_size": 2}
    (line,) = refused(prepared, model=model, **{**LAYOUT, **changes})
    assert line.startswith("7 ranks do not divide by tp 2 x pp 1 x cp 1 = 2: ")


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
    monkeypatch.setattr(hetero, "encoders_of", lambda model: [("model.image_encoder", encoder)])
    found = hetero.own_ranks_sizes(prepared[0], prepared[1])
    said = f"model.image_encoder.{kind}_model_parallel_size 2 with a rank_offset"
    assert found == (said if refused else None)
