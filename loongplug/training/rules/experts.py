"""Experts. All checks except the first return None for a dense model."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.training.rules.rule import LOCAL_LAYERS, Choice, excludes, flag, indivisible, rule

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
DISPATCHERS = ("alltoall", "allgather")


def _etp(args: Namespace) -> int:
    size: int | None = args.expert_tensor_parallel_size
    return args.tensor_model_parallel_size if size is None else size


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


@rule(reason="there are no experts to distribute", cure="drop the flag")
def expert_parallel(args: Namespace, model: Any) -> str | None:
    """`--expert-model-parallel-size` or `--expert-tensor-parallel-size` above 1 with a dense
    model
    """
    sizes = {
        "--expert-model-parallel-size": args.expert_model_parallel_size,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size or 1,
    }
    given = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    return None if args.num_experts else ", ".join(given) or None


@rule(
    reason="each copy of the experts takes that many ranks",
    cure="change the number of processes, or the parallel sizes (expert tp is tp unless "
    "--expert-tensor-parallel-size is given)",
)
def expert_world(args: Namespace, model: Any) -> str | None:
    """the number of ranks is not a multiple of expert tp x ep x pp"""
    etp, ep, pp = _etp(args), args.expert_model_parallel_size, args.pipeline_model_parallel_size
    each, ranks = etp * ep * pp, args.world_size
    if not args.num_experts or min(etp, ep, pp) < 1 or ranks % each == 0:
        return None
    return f"{ranks} ranks do not divide by expert tp {etp} x ep {ep} x pp {pp} = {each}"


@rule(
    reason="every rank of an expert parallel group holds as many experts",
    cure="choose another --expert-model-parallel-size",
)
def expert_count(args: Namespace, model: Any) -> str | None:
    """`num_experts` that ep does not divide"""
    ep = args.expert_model_parallel_size
    if not args.num_experts or ep < 1 or args.num_experts % ep == 0:
        return None
    return f"{args.num_experts} experts do not divide by ep {ep}"


@rule(
    reason="each rank holds an equal slice of an expert",
    cure="choose another --expert-tensor-parallel-size",
)
def expert_width(args: Namespace, model: Any) -> str | None:
    """an `expert_ffn_hidden_size` that expert tp does not divide"""
    etp = _etp(args)
    if not args.num_experts or etp < 1 or args.moe_ffn_hidden_size % etp == 0:
        return None
    return f"expert_ffn_hidden_size {args.moe_ffn_hidden_size} does not divide by expert tp {etp}"


@rule(
    reason="each rank holds an equal slice of what every token goes through",
    cure="correct model.foundation.shared_expert_ffn_hidden_size, or choose another "
    "--tensor-model-parallel-size",
)
def shared_expert_width(args: Namespace, model: Any) -> str | None:
    """a `shared_expert_ffn_hidden_size` that tp does not divide"""
    width = args.moe_shared_expert_intermediate_size
    if not args.num_experts or width is None:
        return None
    return indivisible("shared_expert_ffn_hidden_size", width, args=args)


@rule(
    reason="the weight of a single expert is always 1, and teaches the router nothing",
    cure="correct model.foundation.experts_per_token",
)
def experts_per_token(args: Namespace, model: Any) -> str | None:
    """`experts_per_token` below 2 or above `num_experts`"""
    if not args.num_experts or 2 <= args.moe_router_topk <= args.num_experts:
        return None
    return f"experts_per_token {args.moe_router_topk} of {args.num_experts} experts"


@rule(
    reason="the ranks of a tensor parallel group would all send the same tokens to the experts",
    cure="add --sequence-parallel",
)
def expert_sequence_parallel(args: Namespace, model: Any) -> str | None:
    """experts with tp above 1 and no `--sequence-parallel`"""
    tp = args.tensor_model_parallel_size
    if not args.num_experts or tp < 2 or args.sequence_parallel:
        return None
    return f"--tensor-model-parallel-size {tp} without --sequence-parallel"


@rule(
    reason="the others choose experts in another way than the published models",
    cure="give one coefficient for each type",
)
def balancing(args: Namespace, model: Any) -> str | None:
    """a `--moe-router-load-balancing-type` other than `aux_loss`, `seq_aux_loss`,
    `global_aux_loss` and `none`, or not one `--moe-aux-loss-coeff` (0 or more) for each
    """
    if not args.num_experts:
        return None
    option, types = "--moe-router-load-balancing-type", _listed(args.moe_router_load_balancing_type)
    coefficients = _listed(args.moe_aux_loss_coeff)
    if wrong := [kind for kind in types if kind not in BALANCING]:
        return f"{option} {' '.join(wrong)}"
    if len(coefficients) != len(types):
        return f"{len(coefficients)} --moe-aux-loss-coeff for {len(types)} {option}"
    if min(coefficients) < 0:
        return f"--moe-aux-loss-coeff {min(coefficients)}"
    return None


def _by_sample(args: Namespace) -> str:
    types = _listed(args.moe_router_load_balancing_type) if args.num_experts else ()
    return "--moe-router-load-balancing-type seq_aux_loss" if "seq_aux_loss" in types else ""


packing_balancing = excludes(
    flag("--packing"),
    Choice(said=_by_sample, in_docs="`--moe-router-load-balancing-type seq_aux_loss`"),
    reason="it balances row by row, and would take a pack for one sample",
    cure="use aux_loss or global_aux_loss, or drop --packing",
)


capacity_balancing = excludes(
    flag("--moe-expert-capacity-factor"),
    Choice(said=_by_sample, in_docs="`--moe-router-load-balancing-type seq_aux_loss`"),
    reason="padding has no part in the capacity, and what is left is no longer told apart by rows",
    cure="use aux_loss or global_aux_loss, or drop --moe-expert-capacity-factor",
)


@rule(
    reason="it would fill experts up with padding, which is sent to none",
    cure="drop the flag",
)
def padded_capacity(args: Namespace, model: Any) -> str | None:
    """`--moe-pad-expert-input-to-capacity`"""
    if not args.num_experts or not args.moe_pad_expert_input_to_capacity:
        return None
    return "--moe-pad-expert-input-to-capacity"


@rule(reason="the others need kernels that are not tested here", cure="drop the flag")
def dispatcher(args: Namespace, model: Any) -> str | None:
    """a `--moe-token-dispatcher-type` other than `alltoall` and `allgather`"""
    if not args.num_experts or args.moe_token_dispatcher_type in DISPATCHERS:
        return None
    return f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}"


grouped_gemm = excludes(
    flag("--moe-grouped-gemm"),
    LOCAL_LAYERS,
    refuses="`--moe-grouped-gemm` without TransformerEngine",
    reason="it is TransformerEngine that has it",
    cure="drop the flag: experts are grouped where they can be",
)
