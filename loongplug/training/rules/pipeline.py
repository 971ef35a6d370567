"""Pipeline stages and virtual ones."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules import batch as batches
from loongplug.training.rules.batch import known_sizes
from loongplug.training.rules.rule import data_parallel_size, evaluates, rule
from loongplug.training.step_sizes import eval_sizes


@rule(
    reason="every stage holds the same number of layers, at least one",
    cure="change --pipeline-model-parallel-size, or say how to split by "
    "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
)
def pipeline_layers(args: Namespace, model: Any) -> str | None:
    """decoder layers that pp does not divide, or fewer than pp"""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    if pp > layers:
        return f"pp {pp} is more than the decoder's {layers} layers"
    uneven = (
        args.decoder_first_pipeline_num_layers
        or args.decoder_last_pipeline_num_layers
        or args.pipeline_model_parallel_layout
    )
    if pp < 1 or uneven or layers % pp == 0:
        return None
    return f"the decoder's {layers} layers do not divide by pp {pp}"


@rule(
    reason="they interleave the stages of a pipeline",
    cure="raise --pipeline-model-parallel-size, or drop the virtual stages",
)
def virtual_needs_pipeline(args: Namespace, model: Any) -> str | None:
    """virtual pipeline stages with pp 1"""
    if args.pipeline_model_parallel_size > 1 or not wants_virtual(args):
        return None
    return "virtual pipeline stages with pp 1"


@rule(reason="every virtual stage holds the same number of layers", cure="choose a divisor")
def virtual_layers(args: Namespace, model: Any) -> str | None:
    """a stage's layers do not divide into its virtual stages"""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    if pp < 2 or layers % pp or args.decoder_first_pipeline_num_layers:
        return None
    per_stage = layers // pp
    virtual = args.num_virtual_stages_per_pipeline_rank
    if virtual and per_stage % virtual and not args.decoder_last_pipeline_num_layers:
        return f"a stage's {per_stage} layers do not divide into {virtual} virtual stages"
    each = args.num_layers_per_virtual_pipeline_stage
    if each and per_stage % each:
        return f"a stage's {per_stage} layers do not divide into virtual stages of {each}"
    return None


@rule(
    reason="the schedule runs them in groups of pp",
    cure="make the number of microbatches a multiple of pp",
    training_only=True,
)
def virtual_microbatches(args: Namespace, model: Any) -> str | None:
    """virtual stages with microbatches that do not fill the interleaved schedule"""
    pp, dp = args.pipeline_model_parallel_size, data_parallel_size(args)
    if pp < 2 or not wants_virtual(args) or not dp or not args.micro_batch_size:
        return None
    if any(each(args, model) for each in (batches.global_batch, batches.eval_batch)):
        return None
    sizes = known_sizes(args)
    each = args.micro_batch_size * dp
    steps = [1] if sizes is None else [size // each or 1 for _, size in sizes.sizes]
    if sizes is not None and evaluates(args):
        batch, of_batch = eval_sizes(args, dp=dp)
        assert batch is not None
        assert of_batch is not None
        steps.append(batch // of_batch)
    group = args.microbatch_group_size_per_vp_stage or pp
    for microbatches in steps:
        left = microbatches % group
        if not (pp <= group <= microbatches and (left == 0 or left >= pp)):
            return (
                f"{microbatches} microbatches a step do not fill the interleaved schedule of pp "
                f"{pp} in groups of {group}"
            )
    return None


@rule(
    reason="two ranks would send and receive several tensors in one exchange", cure="drop the flag"
)
def virtual_overlap(args: Namespace, model: Any) -> str | None:
    """virtual stages at pp 2 with `--no-overlap-p2p-communication`"""
    if args.pipeline_model_parallel_size != 2 or args.overlap_p2p_comm or not wants_virtual(args):
        return None
    return "--no-overlap-p2p-communication with virtual stages at pp 2"


def wants_virtual(args: Namespace) -> bool:
    """Whether flags ask for more than one virtual stage on each rank."""
    if args.pipeline_model_parallel_layout:
        return stages_of_layout(args) > args.pipeline_model_parallel_size
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    return virtual > 1 or args.num_layers_per_virtual_pipeline_stage is not None


def stages_of_layout(args: Namespace) -> int:
    """Of the layout that the flags have, virtual ones too."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = args.pipeline_model_parallel_layout
    return len(PipelineParallelLayerLayout.parse_str_to_list(layout))
