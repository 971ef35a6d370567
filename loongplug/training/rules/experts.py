"""Experts, and the overlap of their exchange with another microbatch's computation.

All checks except the first say nothing of a dense model. Megatron refuses more beside the overlap.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.training.rules.rule import (
    FUSED_ACCUMULATION,
    LOCAL_LAYERS,
    Choice,
    Problems,
    any_of,
    excludes,
    flag,
    needs,
    one_of,
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
    cure="give these, with one coefficient for each",
)
def balancing(args: Namespace, model: Any) -> Problems:
    """a `--moe-router-load-balancing-type` other than `aux_loss`, `seq_aux_loss`,
    `global_aux_loss` and `none`, or not one `--moe-aux-loss-coeff` for each
    """
    types = _listed(args.moe_router_load_balancing_type) if args.num_experts else []
    coefficients = len(_listed(args.moe_aux_loss_coeff))
    if wrong := {*types} - {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}:
        yield f"--moe-router-load-balancing-type {' '.join(sorted(wrong))}"
    elif types and coefficients != len(types):
        yield f"{coefficients} --moe-aux-loss-coeff for {len(types)} balancing types"


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

dispatcher = one_of(
    "--moe-token-dispatcher-type",
    ("alltoall", "allgather"),
    reason="the others need kernels that are not tested here",
    cure="drop the flag",
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
