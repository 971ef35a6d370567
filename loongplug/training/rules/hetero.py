"""Parallel layouts of encoders that are not the decoder's, on its ranks or on their own."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from loongplug.hetero.modes import Mode, may_fill_bubbles, mode_of
from loongplug.hetero.placement import all_apart
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.parallel.layout import Layout
from loongplug.parallel.layout import encoder_sizes as encoder_sizes_of
from loongplug.training.rules import model as model_rules
from loongplug.training.rules.rule import (
    FUSED_ACCUMULATION,
    Problems,
    any_of,
    encoders_of,
    excludes,
    flag,
    indivisible,
    ranks_apart,
    rule,
    value_of,
)

OFFLOAD = any_of(
    flag("--full-hetero-dp-cpu-offload"),
    flag("--offload-encoder-activations"),
    flag("--offload-encoder-state"),
)

STREAMED = flag("--full-hetero-dp-schedule streamed")
_SPEED = flag("--full-hetero-dp-encoder-speed")

# Megatron's flags that count over one layout for all modules, or make groups for one.
_ONE_LAYOUT = {
    "--log-params-norm": False,
    "--log-num-zeros-in-grad": False,
    "--num-distributed-optimizer-instances": 1,
}


def encoder_tp(args: Namespace, encoder: EncoderArchitecture) -> int:
    own: int | None = encoder.tensor_model_parallel_size
    size: int = own or mode_of(args, encoder).encoder_tp or args.tensor_model_parallel_size
    return size


def _modes(args: Namespace, model: Any) -> list[Mode]:
    return [mode_of(args, encoder) for _, encoder in encoders_of(model)]


def full_separation(args: Namespace, model: Any) -> bool:
    return any(mode.on_every_stage for mode in _modes(args, model))


@rule(
    reason="the encoder's replicas fill the decoder's tensor parallel group, or whole stages",
    cure="set a divisor of the decoder's, or null for the decoder's own",
)
def encoder_layout(args: Namespace, model: Any) -> Problems:
    """an encoder `tensor_model_parallel_size` that does not divide the decoder's; with full
    separation it may be a multiple that makes up whole stages
    """
    decoder, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if decoder < 1 or stages < 1:
        return
    for key, encoder in encoders_of(model):
        tp, mode = encoder_tp(args, encoder), mode_of(args, encoder)
        # Where the decoder's forward encodes, a replica's ranks have one part of each row.
        cp = args.context_parallel_size if mode.around_schedule else 1
        beside, everywhere = Layout(tp=decoder, cp=cp, pp=stages), mode.on_every_stage
        fits = tp in encoder_sizes_of(beside, on_first_stage=not everywhere)
        # Ranks of an encoder's own fill no group of the decoder.
        if encoder.rank_offset is None and not fits:
            yield (
                f"{key}.tensor_model_parallel_size {tp} does not divide "
                f"--tensor-model-parallel-size {decoder}"
                + (", nor makes up whole stages" if everywhere else "")
            )


@rule(
    refuses="with an encoder layout of its own (its `tensor_model_parallel_size`, "
    "heterogeneous DP, full separation, ranks of its own, context parallelism): "
    + ", ".join(f"`{name}`" for name in _ONE_LAYOUT),
    reason="these count parameters, or make groups, by one layout for all modules",
    cure="drop the flag",
)
def encoder_state(args: Namespace, model: Any) -> Problems:
    sizes = {encoder_tp(args, encoder) for _, encoder in encoders_of(model)}
    as_decoder = sizes == {args.tensor_model_parallel_size} and args.context_parallel_size == 1
    if as_decoder and all(mode.encoder_tp is None for mode in _modes(args, model)):
        return
    for name, usual in _ONE_LAYOUT.items():
        if value_of(args, name) != usual:
            yield name


@rule(
    reason="encoder and projector are split over the encoder's tensor parallel ranks",
    cure="choose another tensor_model_parallel_size for that encoder",
)
def encoder_sizes(args: Namespace, model: Any) -> Problems:
    """encoder heads, `ffn_hidden_size` or projector width that the encoder's tp does not divide"""
    if encoder_layout(args, model) is not None:
        return
    for key, encoder in encoders_of(model):
        sizes = {
            f"{key}.num_attention_heads": encoder.num_attention_heads,
            f"{key}.ffn_hidden_size": encoder.ffn_hidden_size,
            "the projector's width": encoder.hidden_size
            * getattr(encoder, "spatial_merge_size", 1) ** 2,
        }
        yield from indivisible(sizes, by="the encoder's tp", ranks=encoder_tp(args, encoder))


one_mode = excludes(
    flag("--enable-encoder-hetero-dp"),
    flag("--enable-full-hetero-dp"),
    reason="they are two ways to spread the same work",
    cure="drop one; full separation is the faster one with a pipeline",
)


@rule(
    refuses=f"`--use-vit-dp-balance`, {STREAMED.in_docs}, {_SPEED.in_docs}, {OFFLOAD.in_docs} "
    "without `--enable-full-hetero-dp`, the second and third also with encoders on ranks of their "
    "own alone; a speed of 0, or of a separated schedule; `--dp-balance-trigger-threshold-vit` "
    "without the first",
    reason="elsewhere the encoder works in between the decoder's microbatches, as they come, so "
    "that nothing of it can be away or moved; a speed is for streaming, a threshold for balance",
    cure="add what it needs (--enable-full-hetero-dp before all), or drop the flag",
)
def full_separation_flags(args: Namespace, model: Any) -> Problems:
    modes = _modes(args, model)
    streams, speed = any_of(STREAMED, _SPEED).said(args), args.full_hetero_dp_encoder_speed
    given = any_of(flag("--use-vit-dp-balance"), OFFLOAD).said(args)
    if given and not any(mode.on_every_stage or mode.apart for mode in modes):
        yield f"{given} in the mode {modes[0].name}"
    if streams and not any(mode.on_every_stage for mode in modes):
        yield f"{streams} in the mode {modes[0].name}"
    elif speed == 0 or (speed is not None and not may_fill_bubbles(args)):
        yield f"{_SPEED.said(args)} {speed} with the {args.full_hetero_dp_schedule} schedule"
    if args.dp_balance_trigger_threshold_vit is not None and not args.use_vit_dp_balance:
        yield "--dp-balance-trigger-threshold-vit without --use-vit-dp-balance"


offload_fusion = excludes(
    any_of(flag("--offload-encoder-activations"), flag("--offload-tensors")),
    FUSED_ACCUMULATION,
    reason="what comes back to a backward are new objects, in which the fused kernel does not "
    "find a weight's gradient buffer",
    cure="add --no-gradient-accumulation-fusion",
)
offload_nccl = excludes(
    flag("--offload-encoder-state"),
    flag("--use-nccl-ub", argument="nccl_ub"),
    reason="NCCL knows the encoder's buffers by their addresses, and they come back at others",
    cure="drop one of them",
)
offload_optimizer = excludes(
    flag("--offload-encoder-state"),
    flag("--optimizer-cpu-offload"),
    reason="that optimizer has copies of weights of its own, and keeps its state on the host "
    "already",
    cure="drop --optimizer-cpu-offload, so that the decoder's state stays on the device and "
    "the encoder's leaves in phase 2, or drop --offload-encoder-state, so that all of the "
    "optimizer's state is on the host",
)


_SPREADING = any_of(
    flag("--enable-encoder-hetero-dp"),
    flag("--enable-full-hetero-dp"),
    flag("--use-vit-dp-balance"),
    OFFLOAD,
)


def _lying_apart(model: Any) -> Iterator[tuple[str, Any]]:
    """The settings of each encoder with a ``rank_offset``, with the key that users write."""
    return (each for each in encoders_of(model) if each[1].rank_offset is not None)


@rule(
    reason="beside the decoder it has as many replicas as the decoder's ranks make, each on one "
    "stage, and transformers computes a whole encoder on each rank",
    cure="give a rank_offset with a data_parallel_size, or leave them away",
)
def own_ranks_sizes(args: Namespace, model: Any) -> Problems:
    """an encoder's `data_parallel_size`, `pipeline_model_parallel_size` or `stage_layers` without a
    `rank_offset`; a tensor or pipeline parallel size above 1 with one, where transformers computes
    """
    for key, encoder in encoders_of(model):
        apart, tp = encoder.rank_offset is not None, encoder.tensor_model_parallel_size
        pp, layers = encoder.pipeline_model_parallel_size, encoder.stage_layers
        stages = {"pipeline_model_parallel_size": pp}
        sizes = {"data_parallel_size": encoder.data_parallel_size, **stages}
        sizes["stage_layers"] = None if layers is None else [*layers]
        if apart:
            whole = isinstance(encoder, HuggingFaceEncoderConfig)
            sizes = {"tensor_model_parallel_size": tp, **stages} if whole else {}
        for name, size in sizes.items():
            if size not in (1, None):
                yield f"{key}.{name} {size} {'with' if apart else 'without'} a rank_offset"


@rule(
    reason="each stage has one layer or more, and all of them together those that run",
    cure="change pipeline_model_parallel_size, or the sizes in stage_layers",
)
def own_ranks_layers(args: Namespace, model: Any) -> Problems:
    """more pipeline stages of an encoder than it has layers to run, or `stage_layers` that are not
    one size for each stage, of 1 or more, with a sum of those layers
    """
    for key, encoder in _lying_apart(model):
        stages, layers = encoder.pipeline_model_parallel_size, encoder.computed_layers
        sizes = encoder.stage_layers
        given = f"pipeline_model_parallel_size {stages}"
        if sizes is None and stages > max(layers, 1):
            yield f"{key}.{given} with {layers} layers to run"
        elif sizes is not None and (len(sizes) != stages or min(sizes) < 1 or sum(sizes) != layers):
            yield f"{key}.stage_layers {[*sizes]} with {given} and {layers} layers to run"


@rule(
    reason="each rank holds one module, and the decoder has the ranks before the first encoder's",
    cure="start as many ranks, or change a rank_offset or the encoders' sizes",
)
def own_ranks_world(args: Namespace, model: Any) -> Problems:
    """encoders whose ranks overlap, or have ranks between them that no module lies on; a number of
    ranks that is not the decoder's, up to the least `rank_offset`, and the encoders' together
    """
    if model_rules.positive_sizes(args, model) is not None:
        return
    layouts = {
        key: Layout(
            tp=each.tensor_model_parallel_size or 1,
            pp=each.pipeline_model_parallel_size,
            dp=each.data_parallel_size,
            first_rank=each.rank_offset,
        )
        for key, each in _lying_apart(model)
    }
    if not layouts:
        return
    first, encoders = min(each.first_rank for each in layouts.values()), ranks_apart(model)
    try:
        # How many ranks the decoder has is what the world is held against.
        all_apart(Layout(dp=first), layouts, into="the decoder")
    except ValueError as error:
        yield str(error).rstrip(".")
        return
    if args.ranks != first + encoders:
        yield (
            f"{_ranks(args.ranks)} with rank_offset {first} and {_ranks(encoders)} of encoders: "
            f"expected {first + encoders}"
        )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


@rule(
    refuses=f"a `rank_offset` with the encoder's `mode`, or with {_SPREADING.in_docs}",
    reason="these are about encoders on the decoder's ranks",
    cure="drop them, or leave rank_offset away; an encoder beside another's own ranks can have a "
    "mode",
)
def own_ranks_modes(args: Namespace, model: Any) -> Problems:
    apart = dict(_lying_apart(model))
    given = [f"{key}.mode {each.mode}" for key, each in apart.items() if each.mode is not None]
    given += filter(None, [_SPREADING.said(args)])
    if apart and given:
        yield f"{', '.join(given)} with a rank_offset"
