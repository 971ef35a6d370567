"""Costs of a model by its name, without a command line."""

from argparse import Namespace

import numpy as np
import torch

from loongplug.data.microbatch import Microbatch, Unit
from loongplug.models.freezing import Freezing
from loongplug.partition.splits import costs_of
from loongplug.training.arguments import ParsedArguments
from loongplug.training.config import compose_model
from loongplug.training.freezing import freezing_of

LENGTH = 64
ARGS = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "micro_batch_size": 2,
    "seq_length": LENGTH,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "enable_full_hetero_dp": False,
    "full_hetero_dp_schedule": "separated",
    "enable_encoder_hetero_dp": False,
    "full_hetero_dp_cpu_offload": False,
    "offload_encoder_activations": False,
    "offload_encoder_state": False,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def parsed(*overrides, model="qwen3_vl_tiny", **args):
    composed = compose_model(
        model_name=model, config_file=None, overrides=overrides, trusted_packages=[]
    )
    return ParsedArguments(
        args=Namespace(**{**ARGS, **args}),
        model=composed.config,
        family=composed.family,
        model_yaml={},
        options={},
        overrides=(),
    )


def media(run, *grids):
    """A microbatch with media of these grids for the first encoder, and none for others."""
    first, *others = run.model.encoders
    tokens = sum(map(run.model.encoder(first).tokens, grids))
    units = {
        first: Unit(grids=grids, places=(np.arange(tokens),)),
        **dict.fromkeys(others, Unit()),
    }
    return Microbatch(
        input_ids=None,
        position_ids=torch.empty(3, 1, LENGTH),
        labels=None,
        loss_mask=None,
        tokens=LENGTH,
        units=units,
    )


def trains_of(run, *, freeze=(), train=()) -> Freezing:
    args = Namespace(freeze_parameters=freeze, train_parameters=train)
    return freezing_of(args, run.model)


def costs(run, *microbatches, freeze=(), train=(), apart=(), own=()):
    freezing = trains_of(run, freeze=freeze, train=train)
    return costs_of(run, microbatches, trains=freezing.trains, apart=apart, own=own)
