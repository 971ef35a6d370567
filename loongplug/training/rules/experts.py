"""Experts. But for the first, the checks answer None for a dense model."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from loongplug.training.rules.rule import Rule, indivisible

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


def shared_expert_width(args: Namespace, model: Any) -> str | None:
    """The shared experts' width can be split over the tensor parallel ranks."""
    width = args.moe_shared_expert_intermediate_size
    if not args.num_experts or width is None:
        return None
    return indivisible("shared_expert_ffn_hidden_size", width, args=args)


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


def balancing_by_sample(args: Namespace, model: Any) -> str | None:
    """No loss balances experts sample by sample, which a pack's samples are not kept apart for."""
    kinds = args.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not args.packing or not args.num_experts or "seq_aux_loss" not in kinds:
        return None
    return "--packing with --moe-router-load-balancing-type seq_aux_loss"


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


RULES: tuple[Rule, ...] = (
    Rule(
        name="expert-parallel",
        refuses="`--expert-model-parallel-size` or `--expert-tensor-parallel-size` above 1 with a "
        "dense model",
        check=dense_with_expert_flags,
        reason="there are no experts to distribute",
        cure="drop the flag",
    ),
    Rule(
        name="expert-world",
        refuses="the number of ranks is no multiple of expert tp x ep x pp",
        check=experts_world,
        reason="each copy of the experts takes that many ranks",
        cure="change the number of processes, or the parallel sizes (expert tp is tp unless "
        "--expert-tensor-parallel-size is given)",
    ),
    Rule(
        name="expert-count",
        refuses="`num_experts` that ep does not divide",
        check=experts_divide,
        reason="every rank of an expert parallel group holds as many experts",
        cure="choose another --expert-model-parallel-size",
    ),
    Rule(
        name="expert-width",
        refuses="an `expert_ffn_hidden_size` that expert tp does not divide",
        check=expert_width,
        reason="each rank holds an equal slice of an expert",
        cure="choose another --expert-tensor-parallel-size",
    ),
    Rule(
        name="shared-expert-width",
        refuses="a `shared_expert_ffn_hidden_size` that tp does not divide",
        check=shared_expert_width,
        reason="each rank holds an equal slice of what every token goes through",
        cure="correct model.foundation.shared_expert_ffn_hidden_size, or choose another "
        "--tensor-model-parallel-size",
    ),
    Rule(
        name="experts-per-token",
        refuses="`experts_per_token` below 2 or above `num_experts`",
        check=experts_per_token,
        reason="the weight of a single expert is always 1, and teaches the router nothing",
        cure="correct model.foundation.experts_per_token",
    ),
    Rule(
        name="expert-sequence-parallel",
        refuses="experts with tp above 1 and no `--sequence-parallel`",
        check=experts_sequence_parallel,
        reason="the ranks of a tensor parallel group would all send the same tokens to the experts",
        cure="add --sequence-parallel",
    ),
    Rule(
        name="balancing",
        refuses="a `--moe-router-load-balancing-type` other than `aux_loss`, `seq_aux_loss`, "
        "`global_aux_loss` and `none`, or not one `--moe-aux-loss-coeff` (0 or more) for each",
        check=balancing,
        reason="the others choose experts in another way than the published models",
        cure="give one coefficient for each type",
    ),
    Rule(
        name="packing-balancing",
        refuses="`--packing` with `--moe-router-load-balancing-type seq_aux_loss`",
        check=balancing_by_sample,
        reason="it balances row by row, and would take a pack for one sample",
        cure="use aux_loss or global_aux_loss, or drop --packing",
    ),
    Rule(
        name="dispatcher",
        refuses="a `--moe-token-dispatcher-type` other than `alltoall` and `allgather`",
        check=dispatcher,
        reason="the others need kernels that are not tested here",
        cure="drop the flag",
    ),
    Rule(
        name="grouped-gemm",
        refuses="`--moe-grouped-gemm` without TransformerEngine",
        check=grouped_gemm,
        reason="it is TransformerEngine that has it",
        cure="drop the flag: experts are grouped where they can be",
    ),
)
