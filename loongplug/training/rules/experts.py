"""Experts, the overlap of their exchange, and what the decoder's layers keep or compute twice."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.schedule.tensor_names import RECOMPUTED
from loongplug.training.rules.rule import (
    FUSED_ACCUMULATION,
    LOCAL_LAYERS,
    Choice,
    Problems,
    among,
    any_of,
    excludes,
    flag,
    needs,
    rule,
)

_FLAG = "--overlap-moe-expert-parallel-comm"
_OVERLAP = flag(_FLAG)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


@rule(
    reason="the ranks of a tensor parallel group would all send the same tokens to the experts",
    cure="add --sequence-parallel",
)
def expert_sequence_parallel(args: Namespace, model: Any) -> Problems:
    """experts with tp above 1 and no `--sequence-parallel`"""
    tp = args.tensor_model_parallel_size
    if args.num_experts and tp > 1 and not args.sequence_parallel:
        yield f"--tensor-model-parallel-size {tp} without --sequence-parallel"


@rule(
    reason="the others choose experts in another way than the published models",
    cure="give these, with one coefficient of 0 or more for each",
)
def balancing(args: Namespace, model: Any) -> Problems:
    """a `--moe-router-load-balancing-type` other than `aux_loss`, `seq_aux_loss`,
    `global_aux_loss` and `none`, or not one `--moe-aux-loss-coeff` (0 or more) for each
    """
    types = _listed(args.moe_router_load_balancing_type) if args.num_experts else []
    coefficients = _listed(args.moe_aux_loss_coeff)
    if wrong := {*types} - {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}:
        yield f"--moe-router-load-balancing-type {' '.join(sorted(wrong))}"
    elif types and len(coefficients) != len(types):
        yield f"{len(coefficients)} --moe-aux-loss-coeff for {len(types)} balancing types"
    elif types and min(coefficients) < 0:
        yield f"--moe-aux-loss-coeff {min(coefficients):g}"


def _by_sample(args: Namespace) -> str:
    types = _listed(args.moe_router_load_balancing_type) if args.num_experts else ()
    return "--moe-router-load-balancing-type seq_aux_loss" if "seq_aux_loss" in types else ""


balancing_by_sample = excludes(
    any_of(flag("--packing"), flag("--moe-expert-capacity-factor")),
    Choice(said=_by_sample, in_docs="`--moe-router-load-balancing-type seq_aux_loss`"),
    reason="it balances row by row, and would take a pack for one sample; padding has no part in "
    "the capacity, so that what is left is not told apart by rows",
    cure="use aux_loss or global_aux_loss, or drop the flag",
)

grouped_gemm = excludes(
    flag("--moe-grouped-gemm"),
    LOCAL_LAYERS,
    refuses="`--moe-grouped-gemm` without TransformerEngine",
    reason="it is TransformerEngine that has it",
    cure="drop the flag: experts are grouped where they can be",
)


@rule(
    refuses=f"`{_FLAG}` without `--bf16`",
    reason="Megatron's schedule for it is made for 16-bit weights",
    cure="add --bf16",
    verified=False,
)
def moe_overlap_precision(args: Namespace, model: Any) -> Problems:
    if _OVERLAP.said(args) and not (args.bf16 or args.fp16):
        yield f"{_FLAG} in fp32"


moe_overlap_details = needs(
    any_of(flag("--delay-wgrad-compute"), flag("--ep-overlap-early-attn-memory-release")),
    _OVERLAP,
    reason="they say how its schedule runs",
    cure=f"add {_FLAG}, or drop them",
)
delayed_wgrad = excludes(
    Choice(
        said=lambda args: LOCAL_LAYERS.said(args) and flag("--delay-wgrad-compute").said(args),
        in_docs="`--delay-wgrad-compute`",
    ),
    FUSED_ACCUMULATION,
    refuses="`--delay-wgrad-compute` without TransformerEngine and with "
    f"{FUSED_ACCUMULATION.in_docs}",
    reason="the fused kernel belongs to a backward that computes the weights' gradients too",
    cure="add --no-gradient-accumulation-fusion",
)


_OFFLOADING = "--fine-grained-activation-offloading"
_NODES = among("--recompute-modules", RECOMPUTED)
# Whose outputs are let go of; Megatron asks TransformerEngine for the state of fp8 there.
_DISCARDED = among("--recompute-modules", ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out"))


decoder_offload = needs(
    flag("--offload-tensors"),
    flag(_OFFLOADING),
    reason="that flag is what asks for it",
    cure=f"add {_OFFLOADING}, or drop the names",
)
decoder_offload_twice = excludes(
    flag("--offload-tensors"),
    any_of(flag("--offload-modules"), flag("--recompute-granularity full")),
    reason="Megatron's way would move some tensors too, and a layer that is computed twice as a "
    "whole keeps none of them",
    cure="give one of the two",
)


@rule(
    refuses=f"`--recompute-modules` {_NODES.in_docs} without "
    "`--overlap-moe-expert-parallel-comm` and `--recompute-granularity selective`",
    reason="these are parts of the overlap's schedule",
    cure="add both, or use --recompute-granularity full",
)
def decoder_recompute_nodes(args: Namespace, model: Any) -> Problems:
    needed = ("--overlap-moe-expert-parallel-comm", "--recompute-granularity selective")
    lacks = [each for each in needed if not flag(each).said(args)]
    if lacks and (given := _NODES.said(args)):
        yield f"{given} without {' and '.join(lacks)}"


decoder_recompute_nodes_alone = excludes(
    any_of(among("--recompute-modules", ("layernorm",)), flag("--offload-modules"), joined=" and "),
    _NODES,
    refuses=f"`--recompute-modules layernorm` or `--offload-modules` with {_NODES.in_docs}",
    reason="Megatron begins these in one node of a layer and ends them in another, and a node "
    "that is computed twice does its own part only",
    cure="drop layernorm (a2a_overlap_post_attn computes the norm twice), and offload by "
    "--offload-tensors",
)
decoder_recompute_discarded = excludes(
    _DISCARDED,
    LOCAL_LAYERS,
    refuses=f"`--recompute-modules` {_DISCARDED.in_docs} without TransformerEngine",
    reason="Megatron recomputes these by functions of it",
    cure="recompute core_attn or mlp, the parts of the overlapped schedule, or whole layers "
    "(--recompute-granularity full)",
)
