"""The table of start-up rules: every rule fires on its own case and on no valid run."""

import ast
import copy
import dataclasses
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from command_lines import command_line, write_tokenizer
from expert_cases import EXPERT_CASES

from loongplug.models.qwen3_vl.config import Qwen3VLConfig
from loongplug.models.registry import family_of
from loongplug.training import arguments, checks, rules
from loongplug.training.config import compose_model
from loongplug.training.rules import RULES, markdown_table, violated_rules

pytestmark = pytest.mark.quick

Run = tuple[Namespace, Qwen3VLConfig]
Change = Callable[[Namespace], None]
ModelCases = tuple[list[tuple[int, list[str]]], list[tuple[int, list[str]]]]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A valid run's arguments and model as the rules get them."""
    return prepare(tmp_path_factory.mktemp("run"), model="qwen3_vl_tiny")


@pytest.fixture(scope="module")
def prepared_experts(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same of a model with 8 experts, 2 per token."""
    return prepare(tmp_path_factory.mktemp("experts"), model="qwen3_vl_moe_tiny")


def prepare(folder: Path, *, model: str) -> Run:
    seen: list[Run] = []

    def capture(args: Namespace, model: Any, **options: Any) -> list[str]:
        seen.append((copy.copy(args), model))
        return violated_rules(args, model, **options)

    with patch.object(arguments, "violated_rules", capture):
        arguments.parse_arguments(command_line(folder, model=model))
    return seen[0]


def violated(run: Run, *, model: Qwen3VLConfig | None = None, **changes: Any) -> list[str]:
    """Names of the rules violated once ``changes`` are made to the arguments."""
    args = copy.copy(run[0])
    for name, value in changes.items():
        assert hasattr(args, name), f"Megatron has no argument {name}"
        setattr(args, name, value)
    return names(violated_rules(args, model or run[1]))


def changed(model: Qwen3VLConfig, settings: list[str]) -> Qwen3VLConfig:
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


LAYOUT = {"world_size": 8, "global_batch_size": 16}
TP = {**LAYOUT, "tensor_model_parallel_size": 2}
PP = {**LAYOUT, "pipeline_model_parallel_size": 2}

# Rule -> changes that violate it, and similar ones that do not.
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "required-flags": (
        [
            {name: None}
            for name in ("training_phase", "seq_length", "micro_batch_size", "lr", "train_iters")
        ],
        [{"global_batch_size": None}],
    ),
    "positive-numbers": (
        [
            {"seq_length": 0},
            {"train_iters": 0},
            {"packing_look_ahead": 0},
            {"tensor_model_parallel_size": -1},
        ],
        [{"seq_length": 1}],
    ),
    "tokenizer-folder": ([{"tokenizer_model": None}, {"tokenizer_model": "/nowhere"}], []),
    "data-given": (
        [
            {"train_data_path": None},
            {"train_data_path": []},
            {"data_path": [__file__]},
            {"train_data_path": ["0.5", __file__, __file__]},
            {"train_data_path": ["0.5", __file__, "-1", __file__]},
            {"valid_data_path": [__file__, "0.5"]},
            {"train_data_path": None, "data_path": [__file__], "valid_data_path": [__file__]},
        ],
        [
            {"valid_data_path": [__file__]},
            {"train_data_path": None, "data_path": [__file__, __file__]},
            {"train_data_path": ["0.5", __file__, "2", __file__]},
        ],
    ),
    "data-exists": (
        [
            {"train_data_path": ["/nope"]},
            {"valid_data_path": ["/nope"]},
            {"train_data_path": ["1", __file__, "2", "/nope"]},
            {"media_root": "/nope"},
        ],
        [{"train_data_path": ["1", __file__, "2", __file__], "media_root": "/"}],
    ),
    "energon": (
        [
            {"train_data_path": ["/"]},
            {"valid_data_path": ["1", __file__, "2", "/"]},
            {"dataloader_type": "energon", "train_data_path": ["/"]},
        ],
        [{"train_data_path": ["1", __file__, "2", __file__]}],
    ),
    "video-rate": (
        [{"video_fps": 0.0}, {"video_fps": -1.0}, {"video_fps": float("nan")}],
        [{"video_fps": 0.5}],
    ),
    "hf-folder": ([{"load_hf": "/nope"}], []),
    "checkpoint-to-load": ([{"load": "/nope"}], [{"load": "/nope", "save": "/nope"}]),
    "world-size": (
        [{**TP, "world_size": 7}, {**PP, "world_size": 3}],
        [TP, {**TP, **PP}, {**TP, "world_size": 6, "global_batch_size": 12}],
    ),
    "global-batch": (
        [
            {"global_batch_size": 7},
            {**LAYOUT, "global_batch_size": 8},
            {**TP, "micro_batch_size": 3},
        ],
        [LAYOUT, {**TP, "global_batch_size": 8}, {"global_batch_size": None}],
    ),
    "warm-up": (
        [
            {"train_iters": 10, "lr_warmup_iters": 10},
            {"train_iters": 99, "lr_decay_iters": 10, "lr_warmup_iters": 10},
        ],
        [{"train_iters": 10, "lr_warmup_iters": 9}],
    ),
    "learning-rates": ([{"min_lr": 1.0}], [{"min_lr": 1e-3}]),
    "sequence-length": ([{"seq_length": 4097}], [{"seq_length": 4096}]),
    "packing-rows": (
        [{"packing": True, "micro_batch_size": 2}],
        [{"packing": True, "micro_batch_size": 1}, {"micro_batch_size": 2}],
    ),
    "sequence-parallel": (
        [{**TP, "sequence_parallel": True, "seq_length": 63}],
        [{**TP, "sequence_parallel": True}, {**TP, "seq_length": 63}],
    ),
    "pipeline-layers": (
        [
            {"world_size": 3, "pipeline_model_parallel_size": 3},
            {"world_size": 8, "pipeline_model_parallel_size": 8},
        ],
        [
            PP,
            {
                "world_size": 3,
                "pipeline_model_parallel_size": 3,
                "decoder_last_pipeline_num_layers": 2,
            },
        ],
    ),
    "virtual-needs-pipeline": (
        [{"num_virtual_stages_per_pipeline_rank": 2}, {"num_layers_per_virtual_pipeline_stage": 1}],
        [{"num_virtual_stages_per_pipeline_rank": 1}],
    ),
    "virtual-layers": (
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 3},
            {**PP, "num_layers_per_virtual_pipeline_stage": 3},
        ],
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 2},
            {**PP, "num_layers_per_virtual_pipeline_stage": 1},
        ],
    ),
    "virtual-microbatches": (
        [
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 24},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 8},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": None},
        ],
        [
            {**PP, "global_batch_size": 24},
            {**PP, "num_virtual_stages_per_pipeline_rank": 2},
            # 5 microbatches in groups of 3 and 2.
            {
                **PP,
                "num_virtual_stages_per_pipeline_rank": 2,
                "global_batch_size": 40,
                "microbatch_group_size_per_vp_stage": 3,
            },
        ],
    ),
    "virtual-overlap": (
        [{**PP, "num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm": False}],
        [{**PP, "overlap_p2p_comm": False}],
    ),
    "encoder-layout": ([], []),
    "hetero-flags": ([{"enable_encoder_hetero_dp": True}, {"enable_full_hetero_dp": True}], []),
    "context-parallel": ([{**LAYOUT, "context_parallel_size": 2}], []),
    "expert-parallel": (
        [{"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}],
        [{"expert_tensor_parallel_size": 1}],
    ),
    "grouped-gemm": ([{"moe_grouped_gemm": True}], []),
    "precision": ([{"fp16": True}, {"fp8": "e4m3"}, {"fp4": "e2m1"}], [{"bf16": True}]),
    "checkpoint-format": ([{"ckpt_format": "torch"}], []),
    "asynchronous-save": (
        [
            {"async_save": True, "async_strategy": "nvrx"},
            {
                "device": "cuda",
                "distributed_backend": "nccl",
                "async_save": True,
                "async_strategy": "nvrx",
            },
        ],
        [{"async_save": True, "async_strategy": "mcore"}, {"async_strategy": "nvrx"}],
    ),
    "data-loading": (
        [{"dataloader_type": "cyclic"}, {"tokenizer_type": "TikTokenizer"}],
        [{"tokenizer_type": "HuggingFaceTokenizer"}],
    ),
    "backend": (
        [{"distributed_backend": "nccl"}, {"device": "cuda"}],
        [{"distributed_backend": "nccl", "device": "cuda"}],
    ),
    "transformer-engine": (
        [{"transformer_impl": "transformer_engine"}, {"transformer_impl": "inference_optimized"}],
        [],
    ),
    "unsupported": (
        [{"mock_data": True}, {"use_checkpoint_args": True}, {"cuda_graph_impl": "local"}],
        [],
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_rule_fires_alone_and_leaves_its_neighbours(prepared: Run, rule: str) -> None:
    bad, good = CASES[rule]
    for changes in bad:
        assert violated(prepared, **changes) == [rule], changes
    for changes in good:
        assert violated(prepared, **changes) == [], changes


# Rule -> overrides (and tp) that violate it, and similar ones that do not.
MODEL_CASES: dict[str, ModelCases] = {
    "decoder-heads": (
        [
            (4, []),
            (2, ["foundation.num_attention_heads=5", "foundation.num_query_groups=1"]),
            (2, ["foundation.num_query_groups=1"]),
        ],
        [
            (4, ["foundation.num_query_groups=4"]),
            (2, ["foundation.num_attention_heads=6"]),
        ],
    ),
    "decoder-ffn": (
        [(2, ["foundation.ffn_hidden_size=383"])],
        [(1, ["foundation.ffn_hidden_size=383"])],
    ),
    "vocabulary": ([(2, ["foundation.vocab_size=129"])], [(2, ["foundation.vocab_size=130"])]),
    "encoder-sizes": (
        [
            (2, ["image_encoder.num_attention_heads=1"]),
            (2, ["image_encoder.ffn_hidden_size=127"]),
            (
                2,
                [
                    "image_encoder.hidden_size=20",
                    "image_encoder.num_attention_heads=1",
                    "image_encoder.spatial_merge_size=1",
                ],
            ),
        ],
        [(2, ["image_encoder.num_attention_heads=2"])],
    ),
    "encoder-layout": (
        [
            (2, ["image_encoder.tensor_model_parallel_size=1"]),
            (1, ["image_encoder.tensor_model_parallel_size=2"]),
        ],
        [(2, ["image_encoder.tensor_model_parallel_size=2"])],
    ),
    "positive-sizes": (
        [(1, ["image_encoder.patch_size=0"]), (1, ["foundation.layernorm_epsilon=0"])],
        [],
    ),
    "query-groups": (
        [(1, ["foundation.num_query_groups=3"])],
        [(1, ["foundation.num_query_groups=4"])],
    ),
    "encoder-shape": (
        [
            (1, ["image_encoder.num_attention_heads=3"]),
            (1, ["image_encoder.num_attention_heads=32"]),  # heads of 2
            (1, ["image_encoder.num_position_embeddings=63"]),
        ],
        [(1, ["image_encoder.num_attention_heads=16", "image_encoder.num_position_embeddings=49"])],
    ),
    "deepstack": (
        [
            (1, ["image_encoder.deepstack_layers=[0,3]"]),
            (1, ["image_encoder.deepstack_layers=[-1]"]),
            (1, ["image_encoder.deepstack_layers=[1,0]"]),
            (1, ["image_encoder.deepstack_layers=[1,1]"]),
            (1, ["image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=2"]),
        ],
        [
            (1, ["image_encoder.deepstack_layers=[]"]),
            (1, ["image_encoder.deepstack_layers=[0,1,2]", "foundation.num_layers=3"]),
        ],
    ),
    "mrope": (
        [
            (1, ["foundation.mrope_section=[6,6,6]"]),
            (1, ["foundation.mrope_section=[12,10,10]"]),  # kv_channels, not half of them
            (1, ["foundation.mrope_section=[4,6,6]"]),  # no third pair is left for the sixth
            (1, ["foundation.kv_channels=33"]),
        ],
        [
            (1, ["foundation.mrope_section=[6,5,5]"]),
            (1, ["foundation.mrope_section=[24,20,20]", "foundation.kv_channels=128"]),
            (1, ["foundation.mrope_section=[16,0,0]"]),
        ],
    ),
    "tokenizer-fits": (
        [
            (1, ["image_token_id=6"]),
            (1, ["foundation.vocab_size=99"]),
        ],
        [(1, ["image_token_id=5", "vision_end_token_id=4"]), (1, ["foundation.vocab_size=100"])],
    ),
}


# The same for what only Qwen2.5-VL has.
QWEN2_5_CASES: dict[str, ModelCases] = {
    "windows": (
        [
            (1, ["image_encoder.window_size=31"]),
            (1, ["image_encoder.full_attention_layers=[1,4]"]),
            (1, ["image_encoder.full_attention_layers=[-1]"]),
            (1, ["image_encoder.full_attention_layers=[3,1]"]),
            (1, ["image_encoder.full_attention_layers=[1,1]"]),
        ],
        [
            (1, ["image_encoder.window_size=70"]),
            (1, ["image_encoder.full_attention_layers=[]"]),
            (2, ["image_encoder.full_attention_layers=[0,1,2,3]"]),
        ],
    ),
    "encoder-sizes": (
        [(4, ["image_encoder.ffn_hidden_size=3422", "foundation.num_query_groups=4"])],
        [(4, ["image_encoder.ffn_hidden_size=3420", "foundation.num_query_groups=4"])],
    ),
}


@pytest.mark.parametrize("rule", MODEL_CASES)
def test_model_rule_fires_alone_and_leaves_its_neighbours(prepared: Run, rule: str) -> None:
    fires_alone(prepared, rule, model=prepared[1], cases=MODEL_CASES[rule])


@pytest.mark.parametrize("rule", QWEN2_5_CASES)
def test_qwen2_5_rule_fires_alone_and_leaves_its_neighbours(prepared: Run, rule: str) -> None:
    known = prepared[1]
    ids = {name: getattr(known, name) for name in family_of(known).special_tokens}
    model = dataclasses.replace(compose_model(model_name="qwen2_5_vl_tiny").config, **ids)
    fires_alone(prepared, rule, model=model, cases=QWEN2_5_CASES[rule])


def fires_alone(prepared: Run, rule: str, *, model: Any, cases: ModelCases) -> None:
    original = model
    for some, expected in zip(cases, ([rule], []), strict=True):
        for tp, overrides in some:
            model = changed(original, overrides)
            decided = {
                name: argument.value
                for name, argument in family_of(model).megatron_arguments(model).items()
            }
            found = violated(
                prepared,
                model=model,
                **decided,
                world_size=4,
                global_batch_size=16,
                tensor_model_parallel_size=tp,
            )
            assert found == expected, (tp, overrides)


@pytest.mark.parametrize("rule", EXPERT_CASES)
def test_expert_rule_fires_alone_and_leaves_its_neighbours(
    prepared_experts: Run, rule: str
) -> None:
    for cases, expected in zip(EXPERT_CASES[rule], ([rule], []), strict=True):
        for changes in cases:
            layout = {"world_size": 8, "global_batch_size": 16}
            assert violated(prepared_experts, **(layout | changes)) == expected, changes


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    all_cases = CASES | QWEN2_5_CASES | MODEL_CASES | EXPERT_CASES
    with_bad_case = {name for name, (bad, _) in all_cases.items() if bad}
    assert {rule.name for rule in RULES} == with_bad_case


@pytest.mark.parametrize("name", checks.UNSUPPORTED)
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
    (tmp_path / "mine" / "tokenizer.json").write_text("{")
    (line,) = violated_rules(args, model)
    assert "is no tokenizer of Hugging Face's format" in line


def test_all_violations_are_reported_in_the_table_s_order(prepared: Run) -> None:
    found = violated(prepared, fp16=True, lr=None, ckpt_format="torch")
    assert found == ["required-flags", "precision", "checkpoint-format"]


def test_docs_show_the_table_as_it_is() -> None:
    begin, end = "<!-- rules: begin -->\n", "\n<!-- rules: end -->"
    text = DOCS.read_text(encoding="utf-8")
    assert text.count(begin) == text.count(end) == 1
    shown = text.partition(begin)[2].partition(end)[0]
    assert shown == markdown_table(), (
        "docs/configuration.md is stale: put the output of "
        "'python -m loongplug.training.rules' between its markers"
    )


def test_table_has_one_row_of_four_cells_for_each_rule() -> None:
    rows = rules.markdown_table().splitlines()
    assert len(rows) == len(RULES) + 2
    assert all(row.count("|") == 5 for row in rows)
