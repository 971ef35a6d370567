"""What a step of full separation takes, for who puts an encoder into the pipeline's bubbles.

Counted from sizes, in operations of one rank; the same on every rank, which all plan alike.
"""

from argparse import Namespace
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training.argument_utils import core_transformer_config_from_args

from loongplug.data.microbatch import Share
from loongplug.data.sample import Grid
from loongplug.hetero.bubble_planner import StreamedCosts, Units
from loongplug.hetero.step_programs import PassCosts, PieceCost
from loongplug.models.amounts import ModelAmounts
from loongplug.models.decoder import DecoderConfig
from loongplug.models.entries import Entry
from loongplug.models.registry import family_of
from loongplug.training.freezing import freezing_of
from loongplug.training.layer_costs import decoder_costs
from loongplug.training.rank_data import assignment_of
from loongplug.training.rules.hetero import encoder_tp

# What a layer of the encoder takes in a forward however few its rows are, in operations that the
# device does meanwhile: calls, small products. Measured on a core of 60 GFLOP/s, where a pass of
# five layers takes some 11 ms more than its rows do, backward included. That of a GPU is an
# estimate: 20 kernels of 3 us each at 400 TFLOP/s.
OF_A_LAYER = {"cpu": 40_000_000, "cuda": 24_000_000_000}


def streamed_costs(args: Namespace, model: Any, *, entry: Entry) -> StreamedCosts:
    """The costs of a step of checked arguments, for the encoder that streams.

    A microbatch of the decoder counts with its padding, and a pack as one whole row.
    """
    hugging_face = family_of(model, trusted_packages=args.trusted_packages).load_hugging_face(model)
    amounts = ModelAmounts.of(model, hugging_face, trains=freezing_of(args, model).trains)
    encoder, own = model.encoder(entry.name), amounts.entries[entry.name]
    tp, speed = encoder_tp(args, encoder), args.full_hetero_dp_encoder_speed or 1.0

    def of_media(grids: Sequence[Grid]) -> PieceCost:
        ways = amounts.of_media(entry.name, grids, recomputed=encoder.recompute)
        return PieceCost(*(round(each / tp / speed) for each in ways))

    def assigned(units: Units, replicas: int) -> Sequence[tuple[Share, ...]]:
        return assignment_of(args, encoder, replicas=replicas).of_step(units)

    of_a_pass = OF_A_LAYER[args.target_device] * (encoder.computed_layers + 1)  # with projectors
    joined = encoder.joined_rows // encoder.rows_per_state * own.forward["states"]
    rows = [(args.seq_length,) * args.micro_batch_size]
    decoder = decoder_costs(args, amounts.decoder, rows)
    ends = accumulate(_layers_by_place(args), initial=0)
    stages = [decoder.stage(*each) for each in pairwise(ends)]
    return StreamedCosts(
        of_media=of_media,
        tokens=encoder.tokens,
        forward=tuple(each.forward for each in stages),
        backward=tuple(each.backward for each in stages),
        group=args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size,
        of_passes=PassCosts(
            trains=own.trains,
            each=PieceCost(of_a_pass, 2 * of_a_pass if own.trains else 0),
            joined=round(joined / tp / speed),
        ),
        assigned=assigned,
        joined_rows=None
        if args.offload_encoder_activations and own.trains
        else encoder.joined_rows,
    )


def _layers_by_place(args: Namespace) -> list[int]:
    """How many of the decoder's layers are in each stage or virtual chunk, in their order."""
    config = core_transformer_config_from_args(args, DecoderConfig)
    chunks = args.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    return [
        get_num_layers_to_build(config, chunk, stage)
        if layout is None  # else this would be the rank's own number
        else layout.get_num_layers_to_build(vp_stage=chunk or 0, pp_rank=stage)
        for chunk in ([None] if chunks is None else range(chunks))
        for stage in range(args.pipeline_model_parallel_size)
    ]
