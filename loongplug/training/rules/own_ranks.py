"""Encoders on ranks of their own, by their ``rank_offset``."""

from argparse import Namespace
from typing import Any

from loongplug.hetero.placement import all_apart
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.entries import Role
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.parallel.layout import Layout
from loongplug.training.rules.rule import any_of, flag, ranks_apart, rule

_SPREADING = any_of(
    flag("--enable-encoder-hetero-dp"),
    flag("--enable-full-hetero-dp"),
    flag("--use-vit-dp-balance"),
    flag("--full-hetero-dp-cpu-offload"),
    flag("--offload-encoder-activations"),
    flag("--offload-encoder-state"),
    in_docs="`--enable-encoder-hetero-dp`, `--enable-full-hetero-dp`, `--use-vit-dp-balance`, "
    "`--full-hetero-dp-cpu-offload`, `--offload-encoder-activations`, `--offload-encoder-state`",
)


def lying_apart(model: Any) -> dict[str, EncoderArchitecture]:
    """The encoders with a ``rank_offset``, by name."""
    found = {name: model.encoder(name) for name in model.encoders}
    return {name: each for name, each in found.items() if each.rank_offset is not None}


@rule(
    reason="the decoder has the first ranks of the world",
    cure="give the number of the decoder's ranks, or null to lie where it lies",
)
def own_ranks_offset(args: Namespace, model: Any) -> str | None:
    """an encoder's `rank_offset` below 1"""
    wrong = [
        f"model.{model.keys[name]}.rank_offset is {each.rank_offset}"
        for name, each in lying_apart(model).items()
        if each.rank_offset is not None and each.rank_offset < 1
    ]
    return ", ".join(wrong) or None


@rule(
    reason="beside the decoder it has as many replicas as the decoder's ranks make",
    cure="give a rank_offset, or leave data_parallel_size away",
)
def own_ranks_replicas(args: Namespace, model: Any) -> str | None:
    """an encoder's `data_parallel_size` other than 1 without a `rank_offset`"""
    wrong = [
        f"model.{model.keys[name]}.data_parallel_size {size} without a rank_offset"
        for name in model.encoders
        if (size := model.encoder(name).data_parallel_size) > 1
        and model.encoder(name).rank_offset is None
    ]
    return ", ".join(wrong) or None


@rule(
    reason="beside the decoder an encoder has no stages of its own",
    cure="give a rank_offset, or leave pipeline_model_parallel_size and stage_layers away",
)
def own_ranks_pipeline(args: Namespace, model: Any) -> str | None:
    """an encoder's `pipeline_model_parallel_size` above 1, or `stage_layers`, without a
    `rank_offset`
    """
    wrong = []
    for name in model.encoders:
        encoder = model.encoder(name)
        if encoder.rank_offset is not None:
            continue
        if encoder.pipeline_model_parallel_size > 1:
            size = encoder.pipeline_model_parallel_size
            wrong.append(f"model.{model.keys[name]}.pipeline_model_parallel_size {size}")
        elif encoder.stage_layers is not None:
            wrong.append(f"model.{model.keys[name]}.stage_layers {[*encoder.stage_layers]}")
    return f"{', '.join(wrong)} without a rank_offset" if wrong else None


@rule(
    reason="each stage has one layer or more, and all of them together those that run",
    cure="change pipeline_model_parallel_size, or the sizes in stage_layers",
)
def own_ranks_layers(args: Namespace, model: Any) -> str | None:
    """more pipeline stages of an encoder than it has layers to run, or `stage_layers` that are not
    one size for each stage, of 1 or more, with a sum of those layers
    """
    wrong = []
    for name, each in lying_apart(model).items():
        key, stages = f"model.{model.keys[name]}", each.pipeline_model_parallel_size
        layers, sizes = each.computed_layers, each.stage_layers
        if sizes is None and stages > max(layers, 1):
            wrong.append(f"{key}.pipeline_model_parallel_size {stages} with {layers} layers to run")
        elif sizes is not None and (len(sizes) != stages or min(sizes) < 1 or sum(sizes) != layers):
            wrong.append(
                f"{key}.stage_layers {[*sizes]} with pipeline_model_parallel_size {stages} and "
                f"{layers} layers to run"
            )
    return ", ".join(wrong) or None


@rule(
    reason="each rank holds one module, and none is without",
    cure="change a rank_offset, or an encoder's parallel sizes",
)
def own_ranks_placement(args: Namespace, model: Any) -> str | None:
    """encoders whose ranks overlap, or have ranks between them that no module lies on"""
    layouts = _layouts(model)
    if not layouts:
        return None
    (decoder,) = (each.name for each in model.entries() if each.role is Role.DECODER)
    # How many ranks the decoder has is what the world is held against.
    before = Layout(dp=min(each.first_rank for each in layouts.values()))
    try:
        all_apart(before, layouts, into=decoder)
    except ValueError as error:
        return str(error).rstrip(".")
    return None


@rule(
    reason="the decoder has the ranks before the first encoder's, and there are no others",
    cure="start that many, or change a rank_offset or the encoders' sizes",
)
def own_ranks_world(args: Namespace, model: Any) -> str | None:
    """a number of ranks that is not the decoder's, up to the least `rank_offset`, and the
    encoders' together
    """
    layouts = _layouts(model)
    if not layouts or own_ranks_placement(args, model) is not None:
        return None
    first = min(each.first_rank for each in layouts.values())
    encoders = ranks_apart(model)
    if args.ranks == first + encoders:
        return None
    return (
        f"{args.ranks} {_ranks(args.ranks)} with rank_offset {first} and {encoders} "
        f"{_ranks(encoders)} of encoders: expected {first + encoders}"
    )


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _layouts(model: Any) -> dict[str, Layout]:
    """Of the encoders that lie apart; empty where another rule refuses a number."""
    own = lying_apart(model)
    sizes: dict[str, dict[str, Any]] = {
        name: {
            "tp": each.tensor_model_parallel_size or 1,
            "pp": each.pipeline_model_parallel_size,
            "dp": each.data_parallel_size,
            "first_rank": each.rank_offset or 0,
        }
        for name, each in own.items()
    }
    if any(min(numbers.values()) < 1 for numbers in sizes.values()):
        return {}
    return {name: Layout(**numbers) for name, numbers in sizes.items()}


@rule(
    refuses=f"a `rank_offset` with the encoder's `mode`, or with {_SPREADING.in_docs}",
    reason="these are about encoders on the decoder's ranks",
    cure="drop them, or leave rank_offset away; an encoder beside another's own ranks can have a "
    "mode",
)
def own_ranks_modes(args: Namespace, model: Any) -> str | None:
    own = lying_apart(model)
    if not own:
        return None
    modes = [
        f"model.{model.keys[name]}.mode {each.mode}"
        for name, each in own.items()
        if each.mode is not None
    ]
    given = ", ".join(filter(None, (*modes, _SPREADING.said(args))))
    return f"{given} with a rank_offset" if given else None


@rule(
    reason="transformers computes the whole encoder on each rank",
    cure="leave these away, and give a data_parallel_size",
)
def own_ranks_whole(args: Namespace, model: Any) -> str | None:
    """a `rank_offset` and a `tensor_model_parallel_size` or `pipeline_model_parallel_size` above 1
    of an encoder that transformers computes
    """
    wrong = [
        f"model.{model.keys[name]}.{key} {size}"
        for name, each in lying_apart(model).items()
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        if isinstance(each, HuggingFaceEncoderConfig) and (size := getattr(each, key) or 1) > 1
    ]
    return ", ".join(wrong) or None
