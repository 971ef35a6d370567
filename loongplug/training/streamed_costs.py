"""What a step of full separation takes, for who puts encoders into the pipeline's bubbles.

Counted from sizes, in operations of one rank; the same on every rank, which all plan alike.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training.argument_utils import core_transformer_config_from_args

from loongplug.data.microbatch import Share
from loongplug.data.positions import Grid
from loongplug.hetero.balance import EncoderMacs
from loongplug.hetero.step_costs import PassCosts, PieceCost
from loongplug.hetero.streamed_pieces import StreamedCosts, Units
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.decoder import DecoderConfig
from loongplug.models.entries import Entry
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.models.registry import family_of
from loongplug.training.decoder_data import assignment_of
from loongplug.training.freezing import freezing_of
from loongplug.training.layer_costs import decoder_costs
from loongplug.training.rules.hetero import encoder_tp
from loongplug.training.work import Chains

# What a layer of the encoder takes in a forward however few its rows are, in operations that the
# device does meanwhile: calls, small products. Measured on a core of 60 GFLOP/s, where a pass of
# five layers takes some 11 ms more than its rows do, backward included. That of a GPU is an
# estimate: 20 kernels of 3 us each at 400 TFLOP/s.
OF_A_LAYER = {"cpu": 40_000_000, "cuda": 24_000_000_000}


@dataclass(frozen=True, kw_only=True)
class MediaCosts:
    """What one rank of an encoder replica takes for media, forward and backward.

    ``per_state`` and ``per_token`` are of a state of the encoder's layers and of a feature's
    projectors. Of ``layers`` attentions, so many are ``attended``: they have a backward. With
    ``again``, a backward has a forward of the layers besides. ``speed``: so many operations of
    these take as long as one of the decoder's.
    """

    encoder: EncoderArchitecture
    per_state: tuple[int, int]
    per_token: tuple[int, int]
    attended: int
    again: bool
    tp: int
    speed: float

    def of(self, grids: Sequence[Grid]) -> PieceCost:
        """Of these media together."""
        states = sum(map(prod, grids)) // self.encoder.rows_per_state
        tokens = sum(map(self.encoder.tokens, grids))
        attention = 2 * replace(EncoderMacs.of(self.encoder), linear=0).of_units([grids])[0]
        layers = states * self.per_state[0] + attention
        forward = layers + tokens * self.per_token[0]
        backward = states * self.per_state[1] + tokens * self.per_token[1]
        backward += 2 * attention * self.attended // self.encoder.computed_layers
        backward += layers if self.again else 0
        return PieceCost(*(round(each / self.tp / self.speed) for each in (forward, backward)))


def streamed_costs(args: Namespace, model: Any, *, entry: Entry) -> StreamedCosts:
    """Of checked arguments, for one of the model's encoders.

    A microbatch of the decoder counts with its padding, and a pack as one whole row.
    """
    hugging_face = family_of(model, trusted_packages=args.trusted_packages).load_hugging_face(model)
    mapping = with_adapters(hugging_face.mapping, adapter_table(model, hugging_face))
    chains = Chains.of(model, mapping, trains=freezing_of(args, model).trains)
    encoder, chain = model.encoder(entry.name), chains.encoders[entry.name]
    layers = chain.layers.values()
    projectors = [each for one in chains.projectors[entry.name] for each in one.layers.values()]
    trains = chain.trains or any(one.trains for one in chains.projectors[entry.name])
    media = MediaCosts(
        encoder=encoder,
        per_state=(sum(each.forward for each in layers), sum(each.backward for each in layers)),
        per_token=(
            sum(each.forward for each in projectors),
            sum(each.backward for each in projectors),
        ),
        attended=chain.attended,
        again=encoder.recompute and chain.trains,
        tp=encoder_tp(args, encoder),
        speed=args.full_hetero_dp_encoder_speed or 1.0,
    )
    of_a_pass = OF_A_LAYER[args.device] * (encoder.computed_layers + 1)  # with the projectors
    joined = encoder.joined_rows // encoder.rows_per_state * media.per_state[0]
    rows = [(args.seq_length,) * args.micro_batch_size]
    decoder = decoder_costs(args, model.foundation, chains.decoder, rows)
    ends = [0]
    for count in _layers_by_place(args):
        ends.append(ends[-1] + count)
    stages = [decoder.stage(*each) for each in pairwise(ends)]
    return StreamedCosts(
        of_media=media.of,
        tokens=encoder.tokens,
        forward=tuple(each.forward for each in stages),
        backward=tuple(each.backward for each in stages),
        group=args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size,
        of_passes=PassCosts(
            trains=trains,
            each=PieceCost(of_a_pass, 2 * of_a_pass if trains else 0),
            joined=round(joined / media.tp / media.speed),
        ),
        assigned=partial(_assigned, args, encoder),
        joined_rows=None if args.offload_encoder_activations and trains else encoder.joined_rows,
    )


def _assigned(
    args: Namespace, encoder: EncoderArchitecture, units: Units, replicas: int
) -> list[tuple[Share, ...]]:
    return assignment_of(args, encoder, replicas=replicas).of_step(units)


def _layers_by_place(args: Namespace) -> list[int]:
    """How many of the decoder's layers are in each stage or virtual chunk, in their order."""
    config = core_transformer_config_from_args(args, DecoderConfig)
    chunks = args.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout

    def count(chunk: int | None, stage: int) -> int:
        if layout is None:
            found: int = get_num_layers_to_build(config, chunk, stage)
        else:  # the function above would give this rank's own number
            found = layout.get_num_layers_to_build(vp_stage=chunk or 0, pp_rank=stage)
        return found

    return [
        count(chunk, stage)
        for chunk in ([None] if chunks is None else range(chunks))
        for stage in range(args.pipeline_model_parallel_size)
    ]
