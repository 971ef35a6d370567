"""Activations of the decoder's layers: on the host, or computed twice."""

from argparse import Namespace
from typing import Any

from loongplug.schedule.tensor_names import RECOMPUTED
from loongplug.training.rules.rule import FUSED_ACCUMULATION, excludes, flag, rule

_FLAG = "--fine-grained-activation-offloading"
_EXPERTS = ("dispatched_input",)
# Whose outputs are let go of; Megatron asks TransformerEngine for the state of fp8 there.
_DISCARDED = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")


@rule(
    name="decoder-offload",
    refuses=f"`{_FLAG}` without names or with both kinds of them, and `--offload-tensors` "
    "without it",
    reason=(
        "`--offload-tensors` is LoongPlug's way and `--offload-modules` Megatron's, which "
        "asks for TransformerEngine; together they would move the same tensors twice"
    ),
    cure=f"give {_FLAG} --offload-tensors and names",
)
def which(args: Namespace, model: Any) -> str | None:
    """The switch stands with one of the two kinds of names."""
    names = [
        flag
        for flag, given in (
            ("--offload-tensors", args.offload_tensors),
            ("--offload-modules", args.offload_modules),
        )
        if given
    ]
    if args.fine_grained_activation_offloading:
        return None if len(names) == 1 else f"{_FLAG} with {' and '.join(names) or 'no names'}"
    return f"{names[0]} without {_FLAG}" if "--offload-tensors" in names else None


nothing_saved = excludes(
    flag("--offload-tensors"),
    flag("--recompute-granularity full"),
    name="decoder-offload-recompute",
    reason="layers that are recomputed as a whole keep their inputs only",
    cure="drop one of them",
)


fused_accumulation = excludes(
    flag("--offload-tensors"),
    FUSED_ACCUMULATION,
    name="decoder-offload-fusion",
    reason=(
        "what a backward finds are new objects, in which the fused kernel does not find a "
        "weight's gradient buffer"
    ),
    cure="add --no-gradient-accumulation-fusion",
)


@rule(
    name="decoder-offload-experts",
    reason="nothing is dispatched there",
    cure="name fc1_output or fc2_input instead",
)
def experts(args: Namespace, model: Any) -> str | None:
    """`--offload-tensors dispatched_input` for a model without experts"""
    found = [name for name in args.offload_tensors if name in _EXPERTS]
    return f"--offload-tensors {' '.join(found)}" if found and not args.num_experts else None


@rule(
    name="decoder-recompute-nodes",
    refuses="`--recompute-modules` "
    + ", ".join(f"`{name}`" for name in RECOMPUTED)
    + " without `--overlap-moe-expert-parallel-comm` and `--recompute-granularity selective`",
    reason="these are parts of the overlap's schedule",
    cure="add both, or use --recompute-granularity full",
)
def nodes(args: Namespace, model: Any) -> str | None:
    """Parts that are schedule nodes are recomputed where there are such nodes."""
    given = [name for name in args.recompute_modules or () if name in RECOMPUTED]
    lacks = [
        *([] if args.overlap_moe_expert_parallel_comm else ["--overlap-moe-expert-parallel-comm"]),
        *(
            []
            if args.recompute_granularity == "selective"
            else ["--recompute-granularity selective"]
        ),
    ]
    if not given or not lacks:
        return None
    return f"--recompute-modules {' '.join(given)} without {' and '.join(lacks)}"


@rule(
    name="decoder-recompute-nodes-alone",
    refuses="`--recompute-modules layernorm` or `--offload-modules` with "
    + ", ".join(f"`{name}`" for name in RECOMPUTED),
    reason=(
        "Megatron begins these in one node of a layer and ends them in another, and a node "
        "that is computed twice does its own part only"
    ),
    cure=(
        "drop layernorm (a2a_overlap_post_attn computes the norm twice), and offload by "
        "--offload-tensors"
    ),
)
def nodes_alone(args: Namespace, model: Any) -> str | None:
    """What Megatron spreads over several nodes stands without nodes that are computed twice."""
    given = [name for name in args.recompute_modules or () if name in RECOMPUTED]
    others = [
        *(
            ["--recompute-modules layernorm"]
            if "layernorm" in (args.recompute_modules or ())
            else []
        ),
        *(["--offload-modules"] if args.offload_modules else []),
    ]
    if not given or not others:
        return None
    return f"{' and '.join(others)} with --recompute-modules {' '.join(given)}"


@rule(
    name="decoder-recompute-discarded",
    refuses="`--recompute-modules` "
    + ", ".join(f"`{name}`" for name in _DISCARDED)
    + " without TransformerEngine",
    reason="Megatron recomputes these by functions of it",
    cure=(
        "recompute core_attn or mlp, the parts of the overlapped schedule, or whole layers "
        "(--recompute-granularity full)"
    ),
)
def discarded(args: Namespace, model: Any) -> str | None:
    """What lets go of outputs is recomputed where TransformerEngine is."""
    given = [name for name in args.recompute_modules or () if name in _DISCARDED]
    if not given or args.transformer_impl == "transformer_engine":
        return None
    return f"--recompute-modules {' '.join(given)} with --transformer-impl {args.transformer_impl}"
