"""A model with experts on the command line: what its YAML decides, defaults, contradictions."""

from argparse import Namespace

import pytest
from command_lines import command_line

from loongplug.training.arguments import parse_arguments
from loongplug.training.defaults import apply_defaults

pytestmark = pytest.mark.quick


def parse(folder, *more):
    return parse_arguments(command_line(folder, *more, model="qwen3_vl_moe_tiny")).args


def test_the_yaml_decides_experts(tmp_path):
    args = parse(tmp_path)
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (8, 2, 96)
    assert args.moe_token_dispatcher_type == "alltoall"
    assert not args.moe_grouped_gemm
    assert args.moe_aux_loss_coeff == 0
    assert args.moe_z_loss_coeff is None


def test_flags_win_where_the_yaml_does_not_decide(tmp_path):
    args = parse(
        tmp_path,
        *("--moe-token-dispatcher-type", "allgather", "--moe-aux-loss-coeff", "0.1", "0.2"),
        *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"),
    )
    assert args.moe_token_dispatcher_type == "allgather"
    assert args.moe_aux_loss_coeff == [0.1, 0.2]


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-experts", "4"), r"model\.foundation\.num_experts=\.\.\. instead"),
        (("--moe-router-topk", "3"), r"model\.foundation\.experts_per_token"),
        (("--moe-ffn-hidden-size", "64"), r"model\.foundation\.expert_ffn_hidden_size"),
        (("--moe-router-pre-softmax",), "--moe-router-pre-softmax contradicts"),
        (("--moe-grouped-gemm",), r"\[grouped-gemm\]"),
    ],
)
def test_other_experts_than_the_yaml_s_are_refused(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, *flags)


@pytest.mark.parametrize(
    ("experts", "given", "impl", "grouped"),
    [
        (8, (), "transformer_engine", True),
        (8, ("transformer_impl",), "local", False),
        (None, (), "transformer_engine", False),
    ],
)
def test_experts_are_grouped_where_transformer_engine_is(
    monkeypatch, experts, given, impl, grouped
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    args = Namespace(
        device="cuda",
        packing=False,
        num_experts=experts,
        tokenizer_model="tokenizer",
        transformer_impl=impl,
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        valid_data_path=None,
        valid_share=None,
        train_iters=1,
        save=None,
        data_path=None,
        eval_iters=0,
        non_persistent_ckpt_type=None,
        async_save=False,
        wandb_project="",
        wandb_save_dir=None,
    )
    apply_defaults(args, given=given, backend="nccl")
    assert args.moe_grouped_gemm == args.moe_permute_fusion == grouped
    assert args.disable_jit_fuser  # rows vary without packing
    args.packing = True
    apply_defaults(args, given=given, backend="nccl")
    assert not args.disable_jit_fuser
