"""Parts of Megatron that this machine or LoongPlug does not have."""

import importlib.util
from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import (
    Choice,
    Problems,
    flag,
    flag_of,
    needs,
    one_of,
    rule,
)

_UNSET: tuple[object, ...] = (None, False, [])
UNSUPPORTED = (
    "mock_data",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "phase_transition_iterations",
    "full_validation",
    "multiple_validation_sets",
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
    "overlap_param_gather_with_optimizer_step",
    "load_main_params_from_ckpt",
    "use_tp_pp_dp_mapping",
    "ddp_average_in_collective",
    "moe_pad_expert_input_to_capacity",
    "hybrid_context_parallel",
    "hierarchical_context_parallel_sizes",
    "fp16",
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


def _package(title: str, module: str) -> Choice:
    """That a Python package is installed."""
    return Choice(
        said=lambda args: title * (importlib.util.find_spec(module) is not None), in_docs=title
    )


_TRANSFORMER_ENGINE = _package("TransformerEngine", "transformer_engine")

implementation = one_of(
    "--transformer-impl",
    ("local", "transformer_engine"),
    reason="inference has no backward",
    cure="drop the flag: TransformerEngine is used where it is there",
)
optimizer = one_of(
    "--optimizer",
    ("adam", "sgd"),
    reason="the others gather parameters in a way that modules with layouts of their own have not",
    cure="drop the flag for adam",
)
precision_aware_optimizer = needs(
    Choice(
        said=lambda args: (
            flag("--use-precision-aware-optimizer").said(args)
            if args.device == "cuda" and not args.optimizer_cpu_offload
            else ""
        ),
        in_docs="`--use-precision-aware-optimizer` on CUDA",
    ),
    _TRANSFORMER_ENGINE,
    reason="Megatron takes that optimizer from it, and would say so only when the model is there",
    cure="install TransformerEngine, or drop the flag, where its memory is there "
    "(docs/models.md; the launch scripts need it on fewer than 16 GPUs)",
)
checkpoint_format = one_of(
    "--ckpt-format",
    ("torch_dist",),
    reason="only torch_dist checkpoints load into another layout",
    cure="drop the flag",
)


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
