"""Encoders on ranks of their own, by their ``rank_offset``."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from loongplug.hetero.placement import all_apart
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.parallel.layout import Layout
from loongplug.training.rules import model as model_rules
from loongplug.training.rules.hetero import OFFLOAD
from loongplug.training.rules.rule import Problems, any_of, encoders_of, flag, ranks_apart, rule

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
    "stage",
    cure="give a rank_offset, or leave them away",
)
def own_ranks_sizes(args: Namespace, model: Any) -> Problems:
    """an encoder's `data_parallel_size` or `pipeline_model_parallel_size` other than 1, or
    `stage_layers`, without a `rank_offset`
    """
    for key, encoder in encoders_of(model):
        sizes = {
            "data_parallel_size": encoder.data_parallel_size,
            "pipeline_model_parallel_size": encoder.pipeline_model_parallel_size,
            "stage_layers": None if encoder.stage_layers is None else [*encoder.stage_layers],
        }
        for name, size in sizes.items():
            if encoder.rank_offset is None and size not in (1, None):
                yield f"{key}.{name} {size} without a rank_offset"


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


@rule(
    reason="transformers computes the whole encoder on each rank",
    cure="leave these away, and give a data_parallel_size",
)
def own_ranks_whole(args: Namespace, model: Any) -> Problems:
    """a `rank_offset` and a `tensor_model_parallel_size` or `pipeline_model_parallel_size` above 1
    of an encoder that transformers computes
    """
    for key, encoder in _lying_apart(model):
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            size = getattr(encoder, name) or 1
            if isinstance(encoder, HuggingFaceEncoderConfig) and size > 1:
                yield f"{key}.{name} {size}"
