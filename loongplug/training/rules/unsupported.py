"""Flags of Megatron that go around what LoongPlug brings."""

from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import flag_of, rule

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
)


@rule(
    refuses=", ".join(f"`{flag_of(name)}`" for name in UNSUPPORTED)
    + ", `--cuda-graph-impl`, `--rerun-mode validate_results`",
    reason="these parts of Megatron go around what LoongPlug brings, or are not tested with it",
    cure="drop the flag",
)
def unsupported(args: Namespace, model: Any) -> str | None:
    given = [flag_of(name) for name in UNSUPPORTED if getattr(args, name) not in _UNSET]
    if args.cuda_graph_impl != "none":
        given.append("--cuda-graph-impl")
    if args.rerun_mode == "validate_results":  # Megatron's default, but not ours
        given.append("--rerun-mode validate_results")
    return ", ".join(given) or None
