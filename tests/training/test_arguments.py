"""From command lines to checked arguments."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from command_lines import TOKENS, command_line, write_tokenizer
from layout_flags import VIRTUAL

from loongplug.models.hf_config import hf_config
from loongplug.models.registry import families
from loongplug.training.arguments import ParsedArguments, parse_arguments
from loongplug.training.config import compose_model
from loongplug.training.flags import read_command_line, without_flags
from loongplug.training.rules.megatron import UNSUPPORTED
from loongplug.training.run import run


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(("name", "value"), [("RANK", "abc"), ("WORLD_SIZE", "0")])
def test_ranks_that_are_none(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert refusal(command_line(tmp_path)).startswith("RANK is ")


def refusal(argv: list[str]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the tests look at the message)
        parse_arguments(argv)
    return str(caught.value)


def parse(folder: Path, *more: str) -> ParsedArguments:
    return parse_arguments(command_line(folder, *more))


def test_a_folder_alone_says_what_model_and_tokenizer_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    composed = compose_model(model_name="qwen3_vl_tiny")
    names = dict(zip(composed.family.special_tokens, TOKENS.values(), strict=True))
    model = dataclasses.replace(composed.config, **names)
    hf_config(composed.family.load_hugging_face(model)).save_pretrained(folder)
    write_tokenizer(folder)
    named = command_line(tmp_path)
    start = [*without_flags(named, {"model_name", "tokenizer_model"}), "--load-hf", str(folder)]
    parsed = parse_arguments(start)
    assert parsed.model == model
    assert parsed.args.tokenizer_model == str(folder)
    assert parsed.args.num_layers == model.foundation.num_layers
    other = parse_arguments([*start, "--tokenizer-model", str(tmp_path / "tokenizer")]).args
    assert other.tokenizer_model == str(tmp_path / "tokenizer")


# What Megatron gets.


@pytest.mark.not_quick
@pytest.mark.quick
def test_model_s_architecture_reaches_megatron(tmp_path: Path) -> None:
    from megatron.training.argument_utils import core_transformer_config_from_args

    parsed = parse(tmp_path)
    config = core_transformer_config_from_args(parsed.args)
    decoder = parsed.model.foundation
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (4, 128, 384)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 32)
    assert (config.normalization, config.layernorm_epsilon) == ("RMSNorm", 1e-6)
    assert config.qk_layernorm
    assert config.gated_linear_unit
    assert not config.add_bias_linear
    assert not config.add_qkv_bias
    assert config.mrope_section == list(decoder.mrope_section)
    assert config.init_method_std == decoder.initializer_range == 0.08
    assert config.hidden_dropout == config.attention_dropout == 0.0
    assert config.calculate_per_token_loss
    args = parsed.args
    assert args.padded_vocab_size == decoder.vocab_size == 128
    assert args.position_embedding_type == "mrope"
    assert args.rotary_base == decoder.rotary_base
    assert args.untie_embeddings_and_output_weights
    tied = parse(tmp_path, "model.foundation.tie_word_embeddings=true").args
    assert not tied.untie_embeddings_and_output_weights


@pytest.mark.not_quick
@pytest.mark.quick
def test_every_decided_argument_exists_in_megatron(tmp_path: Path) -> None:
    args = read_command_line(command_line(tmp_path)).args
    for name in families():
        composed = compose_model(model_name=f"{name}_tiny")
        decided = composed.family.megatron_arguments(composed.config)
        assert not [argument for argument in decided if not hasattr(args, argument)]
        for argument in decided.values():
            node = composed.config
            for part in argument.key.split(".") if argument.key else ():
                node = getattr(node, part)
    assert not [name for name in UNSUPPORTED if not hasattr(args, name)]


def test_defaults_hold_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    args = parse(tmp_path).args
    assert (args.device, args.distributed_backend, args.transformer_impl) == (
        "cpu",
        "gloo",
        "local",
    )
    assert (args.dataloader_type, args.tokenizer_type) == ("external", "NullTokenizer")
    assert (args.ckpt_format, args.ckpt_fully_parallel_save) == ("torch_dist", True)
    assert args.exit_signal_handler
    assert args.use_cpu_initialization
    assert not args.gradient_accumulation_fusion
    assert not args.bias_swiglu_fusion
    assert args.eval_iters == 0  # there is nothing to evaluate on
    assert args.save_interval is None

    changed = parse(
        tmp_path,
        *("--hidden-dropout", "0.3", "--save", "x", "--tokenizer-type", "HuggingFaceTokenizer"),
        *("--valid-data-path", str(tmp_path / "train.jsonl"), "--eval-interval", "5"),
    ).args
    assert changed.hidden_dropout == 0.3
    assert changed.attention_dropout == 0.0
    assert changed.save_interval == changed.train_iters == 10
    assert (changed.eval_iters, changed.eval_interval) == (None, 5)  # each row once
    assert changed.tokenizer_type == "NullTokenizer"
    assert parse(tmp_path, "--save", "x", "--save-interval", "3").args.save_interval == 3


# Tokens.


@pytest.mark.quick
def test_token_ids_come_from_the_tokenizer(tmp_path: Path) -> None:
    parsed = parse(tmp_path)
    assert parsed.model.image_token_id == TOKENS["<|image_pad|>"]
    assert parsed.model.video_token_id == TOKENS["<|video_pad|>"]
    assert parsed.model.vision_start_token_id == TOKENS["<|vision_start|>"]
    assert parsed.model_yaml["model"]["vision_end_token_id"] == TOKENS["<|vision_end|>"]


def test_vocabulary_may_be_a_list_as_unigram_has_it(tmp_path: Path) -> None:
    argv = command_line(tmp_path)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    pieces = ", ".join('["x", -1.0]' for _ in range(129))
    file.write_text(re.sub(r'"vocab": \{.*?\}', f'"vocab": [{pieces}]', file.read_text()))
    assert "the tokenizer has 129 ids, but the model's vocabulary 128" in refusal(argv)


# Refusals.


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--tensor-modle-parallel-size", "--tensor-model-parallel-size"),
        ("--num_layers", "--num-layers"),
        ("--micro-batchsize=2", "--micro-batch-size"),
        ("--enable-full-hetro-dp", "--enable-full-hetero-dp"),
    ],
)
def test_misspelt_flag_names_the_closest(tmp_path: Path, wrong: str, expected: str) -> None:
    message = refusal(command_line(tmp_path, wrong, "2"))
    flag = wrong.partition("=")[0]
    assert message == f"there is no flag {flag}; the closest is {expected}"


@pytest.mark.quick
def test_every_unknown_flag_is_named_and_their_values_are_not(tmp_path: Path) -> None:
    message = refusal(command_line(tmp_path, "--lrr", "3", "--qqqqqqqqqq", "4"))
    assert message.splitlines() == [
        "there is no flag --lrr; the closest is --lr",
        "there is no flag --qqqqqqqqqq; --help-all lists them all",
    ]
    assert refusal(["stray", *command_line(tmp_path)]) == (
        "stray belongs to no flag and is not an override key=value"
    )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--lr", "abc"], "--lr: invalid float value: 'abc'"),
        (["--lr"], "--lr: expected one argument"),
        (["--optimizer", "adm"], "--optimizer: invalid choice: 'adm'"),
        (["--attention-backend", "foo"], "invalid value 'foo' (choose from flash, fused,"),
        (["--cuda-graph-modules", "foo"], "--cuda-graph-modules: invalid value 'foo'"),
        (["--device", "gpu"], "--device: invalid choice: 'gpu'"),
        (["--training-phase", "rl"], "--training-phase: invalid choice: 'rl'"),
        (["--config-file", "x.yaml"], "--config-file: not allowed with argument --model-name"),
        (["--trusted-packages", "not_there"], "names not_there, which cannot be imported"),
        (["freeze=True"], "override freeze=True: freeze is not a key of a model"),
        (["model.foundation.nope=1"], "model.foundation.nope is not a key of Qwen3DecoderConfig"),
        # Megatron's own assertions, with a text and without one.
        (["--overlap-param-gather"], "refuses the arguments: --overlap-param-gather only"),
        (["--seq-length", "4097"], "max_position_embeddings (4096) must be greater"),
        (["--log-memory-interval", "7"], "refuses the arguments: assert args.log_memory_interval"),
        (["--checkpoint-activations"], "--checkpoint-activations is no longer valid"),
        (["--recompute-granularity", "full"], "recompute_method must be"),
    ],
)
def test_bad_values_are_one_sentence(tmp_path: Path, more: list[str], expected: str) -> None:
    message = refusal(command_line(tmp_path, *more))
    assert expected in message
    assert "\n" not in message


_OVERLAP = ("--overlap-moe-expert-parallel-comm", "--bf16")
_EP2 = ("--model-name", "qwen3_vl_moe_tiny", "--expert-model-parallel-size", "2", *_OVERLAP)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (_OVERLAP, "is only supported with expert model parallelism"),
        (("--model-name", "qwen3_vl_moe_tiny", *_OVERLAP), "only supported with expert model par"),
        ((*_EP2, "--moe-token-dispatcher-type", "allgather"), "with alltoall/flex token dispatch"),
        ((*_EP2, "--moe-shared-expert-overlap"), "disable moe_shared_expert_overlap"),
        (
            (*_EP2, "--overlap-dispatch-backward-with-experts-wgrad"),
            "overlap_moe_expert_parallel_comm must be disabled",
        ),
        ((*VIRTUAL, "--no-overlap-p2p-communication"), "p2p communication overlap is disabled"),
    ],
)
def test_overlap_that_a_layout_cannot_have_is_one_sentence(tmp_path, monkeypatch, more, expected):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    message = refusal(command_line(tmp_path, *more))
    assert message.startswith("Megatron-Core refuses the arguments: ")
    assert expected in message
    assert "\n" not in message


def test_flags_that_contradict_the_model(tmp_path: Path) -> None:
    same = ("--num-layers", "4", "--normalization", "RMSNorm", "--swiglu", "--vocab-size", "128")
    parse(tmp_path, *same, "--mrope-section", "6", "5", "5", "--rotary-base", "10000")
    lines = refusal(
        command_line(
            tmp_path,
            *("--num-layers", "3", "--normalization", "LayerNorm", "--num-experts", "4"),
            *("--untie-embeddings-and-output-weights", "model.foundation.tie_word_embeddings=true"),
        )
    ).splitlines()
    assert len(lines) == 4
    message = "\n".join(lines)
    assert (
        "--num-layers contradicts the model (3, not 4): its YAML decides; use the override "
        "model.foundation.num_layers=... instead" in lines
    )
    assert "override model.foundation.tie_word_embeddings=... instead" in message
    assert (
        "--normalization contradicts the model (LayerNorm, not RMSNorm): this is fixed" in message
    )
    assert "--num-experts contradicts" in message
    # An override is what the YAML says, so the flag has to agree with it.
    parse(tmp_path, "--num-layers", "2", "model.foundation.num_layers=2")


@pytest.mark.quick
def test_contradictions_and_rules_are_reported_together(tmp_path: Path) -> None:
    message = refusal(
        command_line(tmp_path, "--num-layers", "3", "--fp16", "--ckpt-format", "torch")
    )
    assert len(message.splitlines()) == 3


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--use-precision-aware-optimizer"], "only supported with distributed optimizer"),
        (["--exp-avg-dtype", "bf16"], "exp_avg_dtype can only be fp32 when not using precision"),
    ],
)
def test_what_megatrons_optimizers_refuse_is_said_at_the_start(
    flags: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"Megatron-Core refuses the arguments: .*{said}"):
        run(command_line(tmp_path, *flags))


@pytest.mark.not_quick
@pytest.mark.quick
def test_steps_are_not_run_again_but_where_asked(tmp_path: Path) -> None:
    """Megatron's own default passes over what is not finite in the first step."""
    assert parse(tmp_path).args.rerun_mode == "disabled"
    assert parse(tmp_path, "--rerun-mode", "report_stats").args.rerun_mode == "report_stats"


def test_every_rank_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    own = "model.image_encoder.tensor_model_parallel_size=3"
    argv = command_line(tmp_path, "--tensor-model-parallel-size", "2", "--fp16", own)
    messages = set()
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        messages.add(refusal(argv))
    (message,) = messages
    assert "3 ranks do not divide by tp 2 x pp 1 x cp 1 = 2" in message
    assert "model.image_encoder.tensor_model_parallel_size 3 does not divide" in message


# Overrides among flags.


@pytest.mark.quick
def test_overrides_may_stand_anywhere(tmp_path: Path) -> None:
    # --train-data-path takes any number of values: it must not swallow what stands behind it.
    parsed = parse(
        tmp_path,
        *("+model.image_encoder.freeze=True", "--train-data-path", str(tmp_path / "train.jsonl")),
        *("model.foundation.num_layers=6", "--bf16", "++model.foundation.rotary_base=5e5"),
    )
    assert parsed.model.image_encoder.freeze
    assert parsed.args.num_layers == 6
    assert parsed.model.foundation.rotary_base == 5e5
    assert parsed.args.train_data_path == [str(tmp_path / "train.jsonl")]


def test_values_that_look_like_overrides_stay_values(tmp_path: Path) -> None:
    odd = tmp_path / "a.b=c"
    odd.mkdir()
    (odd / "d.jsonl").write_text("{}\n")
    args = parse(
        tmp_path,
        *("--wandb-exp-name", "model.v1=x", "--train-data-path", str(odd / "d.jsonl")),
        "model.image_encoder.freeze=true",
    ).args
    assert args.wandb_exp_name == "model.v1=x"
    assert args.train_data_path == [str(odd / "d.jsonl")]


# Printing.


@pytest.mark.not_quick
@pytest.mark.quick
def test_print_config_needs_no_other_flag_and_prints_on_rank_0_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--device", "cpu", "--model-name", "qwen3_vl_8b", "--print-config"]
    printed = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            parse_arguments([*argv, "model.image_encoder.freeze=true"])
        assert caught.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[1] == ""
    shown = yaml.safe_load(printed[0])["model"]
    assert shown["image_encoder"]["freeze"] is True
    assert shown["foundation"]["hidden_size"] == 4096
    file = tmp_path / "printed.yaml"
    file.write_text(printed[0])
    again = compose_model(config_file=file).config
    assert again.image_encoder.freeze
    assert again.foundation == compose_model(model_name="qwen3_vl_8b").config.foundation


def test_help_is_shown_though_megatron_s_has_bare_percent_signs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--device", "cpu", "--help-all"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--training-phase {pretrain,sft}" in shown
    assert "--tensor-model-parallel-size" in shown
    subjects = re.findall(r"^(?:LoongPlug: )?[a-z][\w' ]*:$", shown, re.M)
    own = [title for title in subjects if title.startswith("LoongPlug: ")]
    assert own[:3] == ["LoongPlug: the model:", "LoongPlug: its weights:", "LoongPlug: data:"]
    assert subjects[1 : len(own) + 1] == own  # behind --help itself, before all of Megatron's


@pytest.mark.quick
def test_pipeline_transfers_have_no_wait_of_the_host(tmp_path: Path) -> None:
    from megatron.training.argument_utils import core_transformer_config_from_args

    from loongplug.models.decoder import DecoderConfig

    config = core_transformer_config_from_args(parse(tmp_path).args, DecoderConfig)
    assert not config.batch_p2p_sync
