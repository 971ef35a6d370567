"""The checks behind the start-up rules about experts.

They follow the contract of :mod:`loongplug.training.checks`, and answer None for a dense model.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
DISPATCHERS = ("alltoall", "allgather")


def dense_with_expert_flags(args: Namespace, model: Any) -> str | None:
    """Parallelism of experts comes with experts only."""
    given = [
        f"{flag} {value}"
        for flag, value in (
            ("--expert-model-parallel-size", args.expert_model_parallel_size),
            ("--expert-tensor-parallel-size", args.expert_tensor_parallel_size or 1),
        )
        if value > 1
    ]
    return None if args.num_experts else ", ".join(given) or None


def experts_world(args: Namespace, model: Any) -> str | None:
    """The ranks share out evenly over copies of the experts."""
    etp, ep, pp = _etp(args), args.expert_model_parallel_size, args.pipeline_model_parallel_size
    if not args.num_experts or min(etp, ep, pp) < 1 or args.world_size % (etp * ep * pp) == 0:
        return None
    return (
        f"{args.world_size} ranks do not divide by expert tp {etp} x ep {ep} x pp {pp} = "
        f"{etp * ep * pp}"
    )


def experts_divide(args: Namespace, model: Any) -> str | None:
    """Every rank of an expert parallel group holds as many experts."""
    ep = args.expert_model_parallel_size
    if not args.num_experts or ep < 1 or args.num_experts % ep == 0:
        return None
    return f"{args.num_experts} experts do not divide by ep {ep}"


def expert_width(args: Namespace, model: Any) -> str | None:
    """An expert's width can be split over the expert tensor parallel ranks."""
    etp = _etp(args)
    if not args.num_experts or etp < 1 or args.moe_ffn_hidden_size % etp == 0:
        return None
    return f"expert_ffn_hidden_size {args.moe_ffn_hidden_size} does not divide by expert tp {etp}"


def experts_per_token(args: Namespace, model: Any) -> str | None:
    """A token goes to two experts at least, and to none twice."""
    if not args.num_experts or 2 <= args.moe_router_topk <= args.num_experts:
        return None
    return f"experts_per_token {args.moe_router_topk} of {args.num_experts} experts"


def experts_sequence_parallel(args: Namespace, model: Any) -> str | None:
    """With experts, tensor parallelism comes with sequence parallelism."""
    tp = args.tensor_model_parallel_size
    if not args.num_experts or tp < 2 or args.sequence_parallel:
        return None
    return f"--tensor-model-parallel-size {tp} without --sequence-parallel"


def balancing(args: Namespace, model: Any) -> str | None:
    """Load is balanced by losses, each with its coefficient."""
    if not args.num_experts:
        return None
    types, coefficients = (
        _listed(args.moe_router_load_balancing_type),
        _listed(args.moe_aux_loss_coeff),
    )
    wrong = [kind for kind in types if kind not in BALANCING]
    if wrong:
        return f"--moe-router-load-balancing-type {' '.join(wrong)}"
    if len(coefficients) != len(types):
        return (
            f"{len(coefficients)} --moe-aux-loss-coeff for {len(types)} "
            "--moe-router-load-balancing-type"
        )
    if min(coefficients) < 0:
        return f"--moe-aux-loss-coeff {min(coefficients)}"
    return None


def dispatcher(args: Namespace, model: Any) -> str | None:
    """Tokens travel by a dispatcher that is tested here."""
    if not args.num_experts or args.moe_token_dispatcher_type in DISPATCHERS:
        return None
    return f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}"


def grouped_gemm(args: Namespace, model: Any) -> str | None:
    """A grouped GEMM is asked for only where it can run."""
    if not args.moe_grouped_gemm or args.transformer_impl == "transformer_engine":
        return None
    return f"--moe-grouped-gemm with --transformer-impl {args.transformer_impl}"


def _etp(args: Namespace) -> int:
    size: int | None = args.expert_tensor_parallel_size
    return args.tensor_model_parallel_size if size is None else size


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
