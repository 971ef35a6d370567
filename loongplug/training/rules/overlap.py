"""The overlap of experts' exchange with the computation of another microbatch."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules.pipeline import wants_virtual
from loongplug.training.rules.rule import excludes, flag, rule

_FLAG = "--overlap-moe-expert-parallel-comm"


@rule(
    name="moe-overlap",
    refuses=f"`{_FLAG}` with a dense model or ep 1",
    reason="no token travels to an expert on another rank, so there is nothing to overlap",
    cure="raise --expert-model-parallel-size, or drop the flag",
)
def something_to_overlap(args: Namespace, model: Any) -> str | None:
    """There are experts on other ranks, to which tokens travel."""
    if not _overlaps(args) or (args.num_experts and args.expert_model_parallel_size > 1):
        return None
    lacks = f"ep {args.expert_model_parallel_size}" if args.num_experts else "a dense model"
    return f"{_FLAG} with {lacks}"


@rule(
    name="moe-overlap-stages",
    refuses=f"`{_FLAG}` with pipeline stages and no virtual ones",
    reason=(
        "of Megatron's pipeline schedules only the interleaved one runs a microbatch's "
        "forward together with another's backward"
    ),
    cure="add --num-virtual-stages-per-pipeline-rank, or drop the pipeline",
)
def overlap_stages(args: Namespace, model: Any) -> str | None:
    """A pipeline is an interleaved one."""
    pp = args.pipeline_model_parallel_size
    if not _overlaps(args) or pp < 2 or wants_virtual(args) or args.pipeline_model_parallel_layout:
        return None
    return f"{_FLAG} with pp {pp} and no virtual stages"


@rule(
    name="moe-overlap-precision",
    refuses=f"`{_FLAG}` without `--bf16`",
    reason="Megatron's schedule for it is made for 16-bit weights",
    cure="add --bf16",
    verified=False,
)
def overlap_precision(args: Namespace, model: Any) -> str | None:
    """Weights are in 16 bits."""
    return f"{_FLAG} in fp32" if _overlaps(args) and not (args.bf16 or args.fp16) else None


overlap_dispatcher = excludes(
    flag(_FLAG),
    flag("--moe-token-dispatcher-type allgather"),
    name="moe-overlap-dispatcher",
    reason="the schedule's nodes are those of an all-to-all",
    cure="use the alltoall dispatcher",
)


@rule(
    name="moe-overlap-recompute",
    refuses=f"`{_FLAG}` with full recompute or with that of a whole layer of experts "
    "(`--recompute-modules moe`)",
    reason=(
        "what is recomputed as a whole cannot be scheduled part by part, and would exchange "
        "its tokens once more"
    ),
    cure=(
        "use --recompute-granularity selective with --recompute-modules a2a_overlap_attn "
        "a2a_overlap_post_attn a2a_overlap_mlp"
    ),
)
def overlap_recompute(args: Namespace, model: Any) -> str | None:
    """No layer and no whole layer of experts is recomputed."""
    given = [
        *(["--recompute-granularity full"] if args.recompute_granularity == "full" else []),
        *(["--recompute-method"] if args.recompute_method is not None else []),
        *(["--recompute-num-layers"] if args.recompute_num_layers is not None else []),
        *(["--recompute-modules moe"] if "moe" in (args.recompute_modules or ()) else []),
        *(["--moe-layer-recompute"] if args.moe_layer_recompute else []),
    ]
    return f"{_FLAG} with {', '.join(given)}" if _overlaps(args) and given else None


@rule(
    name="moe-overlap-once",
    refuses=f"`{_FLAG}` with `--moe-shared-expert-overlap` or "
    "`--overlap-dispatch-backward-with-experts-wgrad`",
    reason="these put other work beside the same exchange",
    cure="choose one of them",
)
def overlapped_once(args: Namespace, model: Any) -> str | None:
    """The exchange is overlapped in one way."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("moe_shared_expert_overlap", "overlap_dispatch_backward_with_experts_wgrad")
        if getattr(args, name)
    ]
    return f"{_FLAG} with {', '.join(given)}" if _overlaps(args) and given else None


@rule(
    name="moe-overlap-details",
    refuses="`--delay-wgrad-compute` or `--ep-overlap-early-attn-memory-release` without "
    f"`{_FLAG}`",
    reason="they say how its schedule runs",
    cure=f"add {_FLAG}, or drop them",
)
def overlap_details(args: Namespace, model: Any) -> str | None:
    """What says how to overlap comes with the overlap."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release")
        if getattr(args, name)
    ]
    return None if _overlaps(args) else ", ".join(given) or None


@rule(
    name="delayed-wgrad",
    reason="the fused kernel belongs to a backward that computes the weights' gradients too",
    cure="add --no-gradient-accumulation-fusion",
)
def delayed_gradients(args: Namespace, model: Any) -> str | None:
    """`--delay-wgrad-compute` without TransformerEngine and with fused gradient accumulation (on
    with Apex)
    """
    if args.transformer_impl == "transformer_engine":
        return None
    if args.delay_wgrad_compute and args.gradient_accumulation_fusion:
        return "--delay-wgrad-compute with Megatron's fused gradient accumulation"
    return None


def _overlaps(args: Namespace) -> bool:
    return bool(args.overlap_moe_expert_parallel_comm)
