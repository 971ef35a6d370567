"""The checks behind the table of start-up rules.

Each takes Megatron's arguments, with the model's architecture and LoongPlug's defaults in place,
and the model's config. It answers None, or what is wrong with the values that were given. A check
whose inputs are missing answers None: another rule asks for them.
"""

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loongplug.models.registry import family_of
from loongplug.training.model_checks import indivisible
from loongplug.training.special_tokens import read_tokenizer, token_problems

Check = Callable[[Namespace, Any], str | None]


# What has to be there.


def required_flags(args: Namespace, model: Any) -> str | None:
    """The flags without a sensible default are given."""
    missing = [
        flag
        for flag, value in (
            ("--training-phase", args.training_phase),
            ("--seq-length", args.seq_length),
            ("--micro-batch-size", args.micro_batch_size),
            ("--lr", args.lr),
            ("--train-iters", args.train_iters),
        )
        if value is None
    ]
    return f"{', '.join(missing)} not given" if missing else None


def positive_numbers(args: Namespace, model: Any) -> str | None:
    """Sizes, counts and intervals are at least 1."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "seq_length",
        "packing_look_ahead",
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "save_interval",
        "log_interval",
        "eval_interval",
    )
    wrong = [
        f"--{name.replace('_', '-')} is {getattr(args, name)}"
        for name in names
        if getattr(args, name) is not None and getattr(args, name) < 1
    ]
    return ", ".join(wrong) or None


def tokenizer_folder(args: Namespace, model: Any) -> str | None:
    """``--tokenizer-model`` is a folder with a tokenizer that can be read."""
    if args.tokenizer_model is None:
        return "--tokenizer-model not given"
    try:
        read_tokenizer(Path(args.tokenizer_model))
    except ValueError as error:
        return f"--tokenizer-model: {error}"
    return None


def tokenizer_fits(args: Namespace, model: Any) -> str | None:
    """The tokenizer's special tokens and ids are those of the model."""
    if tokenizer_folder(args, model) is not None:
        return None
    tokenizer = read_tokenizer(Path(args.tokenizer_model))
    family = family_of(type(model), trusted_packages=args.trusted_packages)
    problems = token_problems(model, tokenizer, special_tokens=family.special_tokens)
    if tokenizer.size > args.padded_vocab_size:
        problems.append(
            f"the tokenizer has {tokenizer.size} ids, but the model's vocabulary "
            f"{args.padded_vocab_size}"
        )
    return "; ".join(problems) or None


def hf_folder(args: Namespace, model: Any) -> str | None:
    """``--load-hf`` is a Hugging Face model folder."""
    if args.load_hf is None or (Path(args.load_hf) / "config.json").is_file():
        return None
    return f"--load-hf {args.load_hf} has no config.json"


def checkpoint_to_load(args: Namespace, model: Any) -> str | None:
    """``--load`` has a checkpoint, or a run that starts from scratch is plainly meant."""
    if args.load is None or args.load == args.save or args.load_hf:
        return None
    if (Path(args.load) / "latest_checkpointed_iteration.txt").is_file():
        return None
    return f"--load {args.load} has no checkpoint"


# The world and the batch.


def world_size(args: Namespace, model: Any) -> str | None:
    """The ranks share out evenly over copies of the model."""
    layout = _model_parallel_size(args)
    if layout < 1 or args.world_size % layout == 0:
        return None
    return (
        f"{args.world_size} ranks do not divide by tp {args.tensor_model_parallel_size} x "
        f"pp {args.pipeline_model_parallel_size} x cp {args.context_parallel_size} = {layout}"
    )


def global_batch(args: Namespace, model: Any) -> str | None:
    """The global batch is a whole number of microbatches on every copy of the model."""
    samples, each, dp = args.global_batch_size, args.micro_batch_size, _data_parallel_size(args)
    if args.decrease_batch_size_if_needed or not samples or not each or not dp:
        return None
    if samples % (each * dp) == 0:
        return None
    return f"--global-batch-size {samples} does not divide by --micro-batch-size {each} x dp {dp}"


def learning_rates(args: Namespace, model: Any) -> str | None:
    """The least learning rate is not above the highest."""
    if args.lr is None or args.min_lr <= args.lr:
        return None
    return f"--min-lr {args.min_lr} is above --lr {args.lr}"


def warmup(args: Namespace, model: Any) -> str | None:
    """The learning rate's warm-up ends before its decay does."""
    end = args.lr_decay_iters or args.train_iters
    if end is None or end < 1 or args.lr_warmup_iters < end:
        return None
    return f"--lr-warmup-iters {args.lr_warmup_iters} does not end before iteration {end}"


def sequence_length(args: Namespace, model: Any) -> str | None:
    """Sequences are no longer than the model's positions."""
    if args.seq_length is None or args.seq_length <= args.max_position_embeddings:
        return None
    return f"--seq-length {args.seq_length} exceeds the model's {args.max_position_embeddings}"


def sequence_parallel(args: Namespace, model: Any) -> str | None:
    """Under sequence parallelism, a sequence can be split over the tensor parallel ranks."""
    if not args.sequence_parallel or args.seq_length is None:
        return None
    return indivisible("--seq-length", args.seq_length, args=args)


# Pipeline.


def pipeline_layers(args: Namespace, model: Any) -> str | None:
    """The decoder's layers share out over the pipeline stages."""
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


def virtual_needs_pipeline(args: Namespace, model: Any) -> str | None:
    """Virtual stages are asked for with a pipeline only."""
    if args.pipeline_model_parallel_size > 1 or not _wants_virtual(args):
        return None
    return "virtual pipeline stages with pp 1"


def virtual_layers(args: Namespace, model: Any) -> str | None:
    """A stage's layers share out evenly over its virtual stages."""
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


def virtual_microbatches(args: Namespace, model: Any) -> str | None:
    """A step has the microbatches that the interleaved schedule needs."""
    pp, dp = args.pipeline_model_parallel_size, _data_parallel_size(args)
    if pp < 2 or not _wants_virtual(args) or not dp or not args.micro_batch_size:
        return None
    if global_batch(args, model) is not None:
        return None
    microbatches = (args.global_batch_size or 0) // (args.micro_batch_size * dp) or 1
    group = args.microbatch_group_size_per_vp_stage or pp
    left = microbatches % group
    if pp <= group <= microbatches and (left == 0 or left >= pp):
        return None
    return (
        f"{microbatches} microbatches a step do not fill the interleaved schedule of pp {pp} "
        f"in groups of {group}"
    )


def virtual_overlap(args: Namespace, model: Any) -> str | None:
    """Two stages with virtual ones overlap their communication, as Megatron asks."""
    if args.pipeline_model_parallel_size != 2 or args.overlap_p2p_comm or not _wants_virtual(args):
        return None
    return "--no-overlap-p2p-communication with virtual stages at pp 2"


# What LoongPlug or Megatron cannot do.


def hetero_flags(args: Namespace, model: Any) -> str | None:
    """No parallel layout is asked for that is still to come."""
    given = [
        flag
        for flag, value in (
            ("--enable-encoder-hetero-dp", args.enable_encoder_hetero_dp),
            ("--enable-full-hetero-dp", args.enable_full_hetero_dp),
        )
        if value
    ]
    return " and ".join(given) or None


def context_parallel(args: Namespace, model: Any) -> str | None:
    """No context parallelism."""
    size = args.context_parallel_size
    return f"--context-parallel-size {size}" if size > 1 else None


def precision(args: Namespace, model: Any) -> str | None:
    """The precision is fp32 or bf16."""
    given = [
        flag
        for flag, value in (
            ("--fp16", args.fp16),
            ("--fp8-format", args.fp8),
            ("--fp4-format", args.fp4),
        )
        if value
    ]
    return " and ".join(given) or None


def checkpoint_format(args: Namespace, model: Any) -> str | None:
    """Checkpoints are in the ``torch_dist`` format."""
    return f"--ckpt-format {args.ckpt_format}" if args.ckpt_format != "torch_dist" else None


def asynchronous_save(args: Namespace, model: Any) -> str | None:
    """Asynchronous saves are written by what the machine has."""
    if not args.async_save or args.async_strategy == "mcore":
        return None
    if args.device == "cpu":
        return f"--async-strategy {args.async_strategy} on cpu"
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return f"--async-strategy {args.async_strategy} without nvidia-resiliency-ext"
    return None


def data_loading(args: Namespace, model: Any) -> str | None:
    """Data and tokenizer are LoongPlug's, not Megatron's."""
    if args.dataloader_type not in ("external", "energon"):
        return f"--dataloader-type {args.dataloader_type}"
    if args.tokenizer_type not in (None, "HuggingFaceTokenizer"):
        return f"--tokenizer-type {args.tokenizer_type}"
    return None


def backend(args: Namespace, model: Any) -> str | None:
    """The communication backend is the device's."""
    expected = {"cpu": "gloo", "cuda": "nccl"}[args.device]
    if args.distributed_backend == expected:
        return None
    return f"--distributed-backend {args.distributed_backend} on {args.device}"


def transformer_engine(args: Namespace, model: Any) -> str | None:
    """TransformerEngine is asked for only where it can be used."""
    if args.transformer_impl == "local":
        return None
    if args.transformer_impl != "transformer_engine":
        return f"--transformer-impl {args.transformer_impl}"
    if args.device == "cpu":
        return "--transformer-impl transformer_engine on cpu"
    if importlib.util.find_spec("transformer_engine") is None:
        return "--transformer-impl transformer_engine without TransformerEngine"
    return None


def unsupported(args: Namespace, model: Any) -> str | None:
    """No flag is given that would change a part of the loop that LoongPlug replaces."""
    given = [
        f"--{name.replace('_', '-')}" for name in UNSUPPORTED if getattr(args, name) not in _UNSET
    ]
    if args.cuda_graph_impl != "none":
        given.append("--cuda-graph-impl")
    return ", ".join(given) or None


_UNSET: tuple[object, ...] = (None, False, [])
UNSUPPORTED = (
    "mock_data",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "phase_transition_iterations",
    "eval_global_batch_size",
    "eval_micro_batch_size",
    "full_validation",
    "multiple_validation_sets",
    "step_batch_size_schedule",
    "yaml_cfg",
    "spec",
    "use_checkpoint_args",
    "use_mp_args_from_checkpoint_args",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "tensor_parallel_num_weight_shards",
    "freeze_all_layers",
    "perform_rl_step",
    "sft",
    "fim_data",
    "skip_train",
    "train_samples",
    "inprocess_restart",
    "lazy_mpu_init",
    "enable_msc",
    "fine_grained_activation_offloading",
    "overlap_moe_expert_parallel_comm",
    "rampup_batch_size",
)


def _model_parallel_size(args: Namespace) -> int:
    return (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )


def _data_parallel_size(args: Namespace) -> int:
    """Replicas of the model, or 0 where the layout does not fit the world."""
    layout = _model_parallel_size(args)
    return args.world_size // layout if layout > 0 and args.world_size % layout == 0 else 0


def _wants_virtual(args: Namespace) -> bool:
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    return virtual > 1 or args.num_layers_per_virtual_pipeline_stage is not None
