"""Parts of Megatron that this machine or LoongPlug does not have."""

import importlib.util
from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import (
    Problems,
    any_of,
    excludes,
    flag,
    flag_of,
    needs,
    rule,
    value_of,
)

_UNSET: tuple[object, ...] = (None, False, [])
UNSUPPORTED = (
    *("mock_data", "test_data_path", "data_args_path", "per_split_data_args_path"),
    *("phase_transition_iterations", "full_validation", "multiple_validation_sets", "yaml_cfg"),
    *("spec", "use_checkpoint_args", "use_mp_args_from_checkpoint_args", "use_megatron_fsdp"),
    *("use_torch_fsdp2", "tensor_parallel_num_weight_shards", "freeze_all_layers"),
    *("perform_rl_step", "sft", "fim_data", "skip_train", "train_samples", "inprocess_restart"),
    *("lazy_mpu_init", "enable_msc", "overlap_param_gather_with_optimizer_step"),
    *("load_main_params_from_ckpt", "use_tp_pp_dp_mapping", "ddp_average_in_collective"),
    *("moe_pad_expert_input_to_capacity", "hybrid_context_parallel"),
    *("hierarchical_context_parallel_sizes", "fp16"),
)


@rule(
    refuses=", ".join(f"`{flag_of(name)}`" for name in UNSUPPORTED)
    + ", `--fp8-format`, `--fp4-format`, `--cuda-graph-impl`, `--rerun-mode validate_results`",
    reason="these parts of Megatron go around what LoongPlug brings, or are not tested with it",
    cure="drop the flag",
)
def unsupported(args: Namespace, model: Any) -> Problems:
    yield from (flag_of(name) for name in UNSUPPORTED if getattr(args, name) not in _UNSET)
    given = {"--fp8-format": args.fp8, "--fp4-format": args.fp4}
    given["--cuda-graph-impl"] = args.cuda_graph_impl != "none"
    yield from (flag for flag, value in given.items() if value)
    if args.rerun_mode == "validate_results":  # Megatron's default, but not ours
        yield "--rerun-mode validate_results"


# Flags of which LoongPlug takes some values, and why no others.
_VALUES = {
    "--optimizer": (
        ("adam", "sgd"),
        "others gather parameters in a way that modules with their own layouts have not",
    ),
    "--ckpt-format": (("torch_dist",), "others do not load into another layout"),
    "--transformer-impl": (("local", "transformer_engine"), "others are not tested here"),
    "--moe-token-dispatcher-type": (("alltoall", "allgather"), "others are not tested here"),
    "--dataloader-type": (("external", "energon"), "LoongPlug loads samples itself"),
    "--tokenizer-type": (("HuggingFaceTokenizer",), "LoongPlug loads the tokenizer itself"),
}


@rule(
    refuses=", ".join(
        f"`{name}` other than {' and '.join(f'`{value}`' for value in values)}"
        for name, (values, _) in _VALUES.items()
    ),
    reason="LoongPlug takes some values of these flags alone",
    cure="drop the flag",
)
def values(args: Namespace, model: Any) -> Problems:
    for name, (known, why) in _VALUES.items():
        if (given := value_of(args, name)) not in (None, *known):
            yield f"{name} {given} ({why})"


@rule(
    reason="that writer needs a GPU and its package",
    cure="drop the flag: the writer is chosen by what is there",
)
def asynchronous_save(args: Namespace, model: Any) -> Problems:
    """`--async-strategy nvrx` with `--async-save` on CPU, or without the package
    nvidia-resiliency-ext
    """
    if not args.async_save or args.async_strategy == "mcore":
        return
    if args.device == "cpu":
        yield f"--async-strategy {args.async_strategy} on cpu"
    elif importlib.util.find_spec("nvidia_resiliency_ext") is None:
        yield f"--async-strategy {args.async_strategy} without nvidia-resiliency-ext"


transformer_engine = excludes(
    flag("--transformer-impl transformer_engine"),
    flag("--device cpu"),
    reason="TransformerEngine runs on CUDA",
    cure="drop one of the two: TransformerEngine is used where it is there",
)
sharded_optimizer = excludes(
    flag("--optimizer sgd"),
    flag("--use-distributed-optimizer"),
    reason="Megatron shards the state of Adam only",
    cure="drop one of the two",
)
wandb_folder = needs(
    flag("--wandb-project"),
    any_of(flag("--save"), flag("--wandb-save-dir")),
    reason="wandb writes the figures to files before it sends them",
    cure="give one of the two",
    training_only=True,
)
