"""Experts, and the overlap of their exchange with another microbatch's computation.

All checks except the first say nothing of a dense model. Megatron refuses more beside the overlap.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.training.rules.layout import wants_virtual
from loongplug.training.rules.rule import (
    DENSE_MODEL,
    FUSED_ACCUMULATION,
    LOCAL_LAYERS,
    Choice,
    Problems,
    among,
    any_of,
    excludes,
    flag,
    indivisible,
    needs,
    number,
    one_of,
    rule,
)

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
DISPATCHERS = ("alltoall", "allgather")
_FLAG = "--overlap-moe-expert-parallel-comm"
_OVERLAP = flag(_FLAG)


def _etp(args: Namespace) -> int:
    size: int | None = args.expert_tensor_parallel_size
    return args.tensor_model_parallel_size if size is None else size


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


expert_parallel = excludes(
    any_of(
        number("--expert-model-parallel-size", above=1),
        number("--expert-tensor-parallel-size", above=1),
    ),
    DENSE_MODEL,
    reason="there are no experts to distribute",
    cure="drop the flag",
)


@rule(
    reason="each copy of the experts takes that many ranks",
    cure="change the number of processes, or the parallel sizes (expert tp is tp unless "
    "--expert-tensor-parallel-size is given)",
)
def expert_world(args: Namespace, model: Any) -> Problems:
    """the number of ranks is not a multiple of expert tp x ep x pp"""
    etp, ep, pp = _etp(args), args.expert_model_parallel_size, args.pipeline_model_parallel_size
    each, ranks = etp * ep * pp, args.world_size
    if args.num_experts and min(etp, ep, pp) > 0 and ranks % each:
        yield f"{ranks} ranks do not divide by expert tp {etp} x ep {ep} x pp {pp} = {each}"


@rule(
    reason="every rank holds as many experts, and an equal slice of each",
    cure="choose another --expert-model-parallel-size or --expert-tensor-parallel-size",
)
def expert_sizes(args: Namespace, model: Any) -> Problems:
    """`num_experts` that ep does not divide, or an `expert_ffn_hidden_size` that expert tp does
    not divide
    """
    if args.num_experts:
        experts, width = {"num_experts": args.num_experts}, args.moe_ffn_hidden_size
        yield from indivisible(experts, by="ep", ranks=args.expert_model_parallel_size)
        yield from indivisible({"expert_ffn_hidden_size": width}, by="expert tp", ranks=_etp(args))


@rule(
    reason="the weight of a single expert is always 1, and teaches the router nothing",
    cure="correct model.foundation.experts_per_token",
)
def experts_per_token(args: Namespace, model: Any) -> Problems:
    """`experts_per_token` below 2 or above `num_experts`"""
    if args.num_experts and not 2 <= args.moe_router_topk <= args.num_experts:
        yield f"experts_per_token {args.moe_router_topk} of {args.num_experts} experts"


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
    cure="give one coefficient for each type",
)
def balancing(args: Namespace, model: Any) -> Problems:
    """a `--moe-router-load-balancing-type` other than `aux_loss`, `seq_aux_loss`,
    `global_aux_loss` and `none`, or not one `--moe-aux-loss-coeff` (0 or more) for each
    """
    if not args.num_experts:
        return
    option, types = "--moe-router-load-balancing-type", _listed(args.moe_router_load_balancing_type)
    coefficients = _listed(args.moe_aux_loss_coeff)
    if wrong := [kind for kind in types if kind not in BALANCING]:
        yield f"{option} {' '.join(wrong)}"
    elif len(coefficients) != len(types):
        yield f"{len(coefficients)} --moe-aux-loss-coeff for {len(types)} {option}"
    elif min(coefficients) < 0:
        yield f"--moe-aux-loss-coeff {min(coefficients)}"


def _by_sample(args: Namespace) -> str:
    types = _listed(args.moe_router_load_balancing_type) if args.num_experts else ()
    return "--moe-router-load-balancing-type seq_aux_loss" if "seq_aux_loss" in types else ""


_BY_SAMPLE = Choice(said=_by_sample, in_docs="`--moe-router-load-balancing-type seq_aux_loss`")

packing_balancing = excludes(
    flag("--packing"),
    _BY_SAMPLE,
    reason="it balances row by row, and would take a pack for one sample",
    cure="use aux_loss or global_aux_loss, or drop --packing",
)
capacity_balancing = excludes(
    flag("--moe-expert-capacity-factor"),
    _BY_SAMPLE,
    reason="padding has no part in the capacity, and what is left is no longer told apart by rows",
    cure="use aux_loss or global_aux_loss, or drop --moe-expert-capacity-factor",
)


padded_capacity = excludes(
    flag("--moe-pad-expert-input-to-capacity"),
    Choice(said=lambda args: "experts" if args.num_experts else "", in_docs="experts"),
    reason="it would fill experts up with padding, which is sent to none",
    cure="drop the flag",
)
dispatcher = one_of(
    "--moe-token-dispatcher-type",
    DISPATCHERS,
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


def _not_interleaved(args: Namespace) -> str:
    pp = args.pipeline_model_parallel_size
    return f"pp {pp} and no virtual stages" if pp > 1 and not wants_virtual(args) else ""


moe_overlap_stages = excludes(
    _OVERLAP,
    Choice(said=_not_interleaved, in_docs="pipeline stages and no virtual ones"),
    reason="of Megatron's pipeline schedules only the interleaved one runs a microbatch's "
    "forward together with another's backward",
    cure="add --num-virtual-stages-per-pipeline-rank, or drop the pipeline",
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


moe_overlap_recompute = excludes(
    _OVERLAP,
    any_of(
        flag("--recompute-granularity full"),
        flag("--recompute-method"),
        flag("--recompute-num-layers"),
        among("--recompute-modules", ("moe",)),
        flag("--moe-layer-recompute"),
        in_docs="full recompute or with that of a whole layer of experts "
        "(`--recompute-modules moe`)",
    ),
    reason="what is recomputed as a whole cannot be scheduled part by part, and would exchange "
    "its tokens once more",
    cure="use --recompute-granularity selective with --recompute-modules a2a_overlap_attn "
    "a2a_overlap_post_attn a2a_overlap_mlp",
)
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
