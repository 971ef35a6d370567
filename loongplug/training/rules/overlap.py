"""The overlap of experts' exchange with the computation of another microbatch."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules.pipeline import wants_virtual
from loongplug.training.rules.rule import (
    FUSED_ACCUMULATION,
    LOCAL_LAYERS,
    Choice,
    among,
    any_of,
    excludes,
    flag,
    rule,
)

_FLAG = "--overlap-moe-expert-parallel-comm"
_OVERLAP = flag(_FLAG)
_DETAILS = any_of(flag("--delay-wgrad-compute"), flag("--ep-overlap-early-attn-memory-release"))


def _nothing_travels(args: Namespace) -> str:
    if not args.num_experts:
        return "a dense model"
    ep = args.expert_model_parallel_size
    return "" if ep > 1 else f"ep {ep}"


def _not_interleaved(args: Namespace) -> str:
    pp = args.pipeline_model_parallel_size
    if pp < 2 or wants_virtual(args):
        return ""
    return f"pp {pp} and no virtual stages"


moe_overlap = excludes(
    _OVERLAP,
    Choice(said=_nothing_travels, in_docs="a dense model or ep 1"),
    reason="no token travels to an expert on another rank, so there is nothing to overlap",
    cure="raise --expert-model-parallel-size, or drop the flag",
)
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
def moe_overlap_precision(args: Namespace, model: Any) -> str | None:
    return f"{_FLAG} in fp32" if _OVERLAP.said(args) and not (args.bf16 or args.fp16) else None


moe_overlap_dispatcher = excludes(
    _OVERLAP,
    flag("--moe-token-dispatcher-type allgather"),
    reason="the schedule's nodes are those of an all-to-all",
    cure="use the alltoall dispatcher",
)
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
moe_overlap_once = excludes(
    _OVERLAP,
    any_of(
        flag("--moe-shared-expert-overlap"),
        flag("--overlap-dispatch-backward-with-experts-wgrad"),
    ),
    reason="these put other work beside the same exchange",
    cure="choose one of them",
)


@rule(
    refuses=f"{_DETAILS.in_docs} without `{_FLAG}`",
    reason="they say how its schedule runs",
    cure=f"add {_FLAG}, or drop them",
)
def moe_overlap_details(args: Namespace, model: Any) -> str | None:
    return None if _OVERLAP.said(args) else _DETAILS.said(args) or None


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
