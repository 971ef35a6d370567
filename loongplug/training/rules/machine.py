"""What depends on the device: precision, kernels, the backend, how checkpoints are written."""

import importlib.util
from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import excludes, flag, rule


@rule(
    reason="the others gather parameters in a way that modules with layouts of their own have not",
    cure="drop the flag for adam",
)
def optimizer(args: Namespace, model: Any) -> str | None:
    """an `--optimizer` other than `adam` and `sgd`"""
    return None if args.optimizer in ("adam", "sgd") else f"--optimizer {args.optimizer}"


@rule(
    reason="the package sends the figures",
    cure="pip install 'loongplug[wandb]'",
    training_only=True,
)
def wandb(args: Namespace, model: Any) -> str | None:
    """`--wandb-project` without the package wandb"""
    there = importlib.util.find_spec("wandb") is not None
    return "--wandb-project without wandb" if args.wandb_project and not there else None


@rule(
    reason="wandb writes the figures to files before it sends them",
    cure="give one of the two",
    training_only=True,
)
def wandb_folder(args: Namespace, model: Any) -> str | None:
    """`--wandb-project` without a folder to write to"""
    if not args.wandb_project or args.save or args.wandb_save_dir:
        return None
    return "--wandb-project without --save and --wandb-save-dir"


sharded_optimizer = excludes(
    flag("--optimizer sgd"),
    flag("--use-distributed-optimizer"),
    reason="Megatron shards the state of Adam only",
    cure="drop one of the two",
)


@rule(
    reason="Megatron takes that optimizer from it, and would say so only when the model is there",
    cure="install TransformerEngine, or drop the flag, where its memory is there "
    "(docs/models.md; the launch scripts need it on fewer than 16 GPUs)",
)
def precision_aware_optimizer(args: Namespace, model: Any) -> str | None:
    """`--use-precision-aware-optimizer` on CUDA without TransformerEngine"""
    if not args.use_precision_aware_optimizer or args.optimizer_cpu_offload:
        return None
    if args.device == "cuda" and importlib.util.find_spec("transformer_engine") is None:
        return "--use-precision-aware-optimizer without TransformerEngine"
    return None


@rule(
    reason="the models are trained in bf16; smaller ranges and formats are not tested",
    cure="use --bf16, or no flag for fp32",
)
def precision(args: Namespace, model: Any) -> str | None:
    """`--fp16`, `--fp8-format`, `--fp4-format`"""
    given = {"--fp16": args.fp16, "--fp8-format": args.fp8, "--fp4-format": args.fp4}
    return " and ".join(flag for flag, value in given.items() if value) or None


@rule(reason="only torch_dist checkpoints load into another layout", cure="drop the flag")
def checkpoint_format(args: Namespace, model: Any) -> str | None:
    """`--ckpt-format` other than `torch_dist`"""
    return f"--ckpt-format {args.ckpt_format}" if args.ckpt_format != "torch_dist" else None


@rule(
    reason="that writer needs a GPU and its package",
    cure="drop the flag: the writer is chosen by what is there",
)
def asynchronous_save(args: Namespace, model: Any) -> str | None:
    """`--async-strategy nvrx` with `--async-save` on CPU, or without the package
    nvidia-resiliency-ext
    """
    if not args.async_save or args.async_strategy == "mcore":
        return None
    if args.device == "cpu":
        return f"--async-strategy {args.async_strategy} on cpu"
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return f"--async-strategy {args.async_strategy} without nvidia-resiliency-ext"
    return None


@rule(
    reason="the backend follows the device",
    cure="drop --distributed-backend, or choose by --device",
)
def backend(args: Namespace, model: Any) -> str | None:
    """`nccl` on CPU, `gloo` on CUDA"""
    expected = {"cpu": "gloo", "cuda": "nccl"}[args.device]
    if args.distributed_backend == expected:
        return None
    return f"--distributed-backend {args.distributed_backend} on {args.device}"


@rule(
    reason="TransformerEngine runs on CUDA, where it is installed; inference has no backward",
    cure="drop the flag: TransformerEngine is used where it is there",
)
def transformer_engine(args: Namespace, model: Any) -> str | None:
    """a `--transformer-impl` that the machine does not have"""
    if args.transformer_impl == "local":
        return None
    if args.transformer_impl != "transformer_engine":
        return f"--transformer-impl {args.transformer_impl}"
    if args.device == "cpu":
        return "--transformer-impl transformer_engine on cpu"
    if importlib.util.find_spec("transformer_engine") is None:
        return "--transformer-impl transformer_engine without TransformerEngine"
    return None
