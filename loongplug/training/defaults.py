"""LoongPlug's values for Megatron's arguments, where the user gave none."""

import importlib.util
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any

from loongplug.training.special_tokens import FILE

# In the run's own tokenizer LoongPlug reads --tokenizer-model itself; Megatron's stays a stub.
MEGATRON_TOKENIZER = "NullTokenizer"


def apply_defaults(
    args: Namespace, *, given: Collection[str], backend: str, adapted_experts: bool = False
) -> None:
    """Set what the user left open; ``backend`` is the platform's for torch.distributed.

    ``adapted_experts``: experts have adapters, which no grouped product has a place for.
    """
    default_tokenizer(args)
    defaults = _common(args) | {"distributed_backend": backend}
    defaults |= _on_cpu() if args.device == "cpu" else _on_cuda(rows_vary=not args.packing)
    for name, value in defaults.items():
        if name not in given:
            setattr(args, name, value)
    if args.num_experts:
        with_engine = args.transformer_impl == "transformer_engine"
        if "moe_grouped_gemm" not in given:
            args.moe_grouped_gemm = with_engine and not adapted_experts
        if "moe_permute_fusion" not in given:  # TransformerEngine's kernels
            args.moe_permute_fusion = with_engine


def default_tokenizer(args: Namespace) -> None:
    """Let ``--tokenizer-model`` be the folder of ``--load-hf`` where only that is given."""
    if args.tokenizer_model is None and args.load_hf and (Path(args.load_hf) / FILE).is_file():
        args.tokenizer_model = args.load_hf


def _common(args: Namespace) -> dict[str, Any]:
    logs = Path(args.wandb_save_dir or args.save or ".")
    sent = bool(args.wandb_project)
    return {
        # Megatron wants a name, and sends to wandb only what it writes for TensorBoard as well.
        "wandb_exp_name": logs.name if sent else "",
        "tensorboard_dir": str(logs / "tensorboard") if sent else None,
        # In which wandb makes a folder wandb; a rule asks for one of the two.
        "wandb_save_dir": args.wandb_save_dir or args.save if sent else None,
        "dataloader_type": "external",
        "moe_token_dispatcher_type": "alltoall",  # allgather sends every token to every rank
        "cp_comm_type": ["all_gather"],  # serves any split of the tokens
        "calculate_per_token_loss": True,  # the same loss under any split of the batch
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "exit_signal_handler": True,  # SIGTERM saves and ends
        "enable_one_logger": False,
        # None: each row once.
        "eval_iters": None if args.valid_data_path or args.valid_share is not None else 0,
        "eval_interval": 1000,  # upstream divides by it, also when nothing is evaluated
        "save_interval": args.train_iters if args.save else None,
        "split": "100,0,0" if args.data_path else None,  # held-out data have files of their own
        # Resume in any layout; Megatron's own default loads under the same TP and PP only. It
        # refuses to combine this with checkpoints in each node's local storage.
        "dist_ckpt_optim_fully_reshardable": args.non_persistent_ckpt_type != "local",
        "use_persistent_ckpt_worker": args.async_save,  # upstream saves in step without it
        # NaN ends the run at once, also in its first step. Upstream runs the step again, saves, and
        # ends without a word to the terminal.
        "rerun_mode": "disabled",
    }


def _on_cpu() -> dict[str, Any]:
    return {
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "num_workers": 0,  # they would take the cores that train
        "async_strategy": "mcore",
        # Kernels that exist for CUDA only, and fusions by torch.compile that cost more than they
        # save in short CPU runs.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "no_persist_layer_norm": True,
        "bias_dropout_fusion": False,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "disable_jit_fuser": True,
    }


def _on_cuda(*, rows_vary: bool) -> dict[str, Any]:
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    has_nvrx = importlib.util.find_spec("nvidia_resiliency_ext") is not None
    has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "transformer_impl": "transformer_engine" if has_engine else "local",
        "async_strategy": "nvrx" if has_nvrx else "mcore",
        "gradient_accumulation_fusion": has_apex,
        "no_persist_layer_norm": not has_engine,
        # torch.compile would compile its fusions again for rows of other lengths.
        "disable_jit_fuser": rows_vary,
    }
