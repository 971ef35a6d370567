"""Activations of the decoder's layers: on the host, or computed twice."""

from argparse import Namespace
from typing import Any

from loongplug.schedule.tensor_names import RECOMPUTED
from loongplug.training.rules.rule import (
    FUSED_ACCUMULATION,
    LOCAL_LAYERS,
    Problems,
    among,
    any_of,
    excludes,
    flag,
    rule,
)

_FLAG = "--fine-grained-activation-offloading"
_NODES = among("--recompute-modules", RECOMPUTED)
# Whose outputs are let go of; Megatron asks TransformerEngine for the state of fp8 there.
_DISCARDED = among("--recompute-modules", ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out"))


@rule(
    refuses=f"`{_FLAG}` without names or with both kinds of them, and `--offload-tensors` "
    "without it",
    reason="`--offload-tensors` is LoongPlug's way and `--offload-modules` Megatron's, which "
    "asks for TransformerEngine; together they would move the same tensors twice",
    cure=f"give {_FLAG} --offload-tensors and names",
)
def decoder_offload(args: Namespace, model: Any) -> Problems:
    ours, megatrons = bool(args.offload_tensors), bool(args.offload_modules)
    if not args.fine_grained_activation_offloading:
        if ours:
            yield f"--offload-tensors without {_FLAG}"
    elif ours and megatrons:
        yield f"{_FLAG} with --offload-tensors and --offload-modules"
    elif not ours and not megatrons:
        yield f"{_FLAG} with no names"


decoder_offload_recompute = excludes(
    flag("--offload-tensors"),
    flag("--recompute-granularity full"),
    reason="layers that are recomputed as a whole keep their inputs only",
    cure="drop one of them",
)
decoder_offload_fusion = excludes(
    flag("--offload-tensors"),
    FUSED_ACCUMULATION,
    reason="what a backward finds are new objects, in which the fused kernel does not find a "
    "weight's gradient buffer",
    cure="add --no-gradient-accumulation-fusion",
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
