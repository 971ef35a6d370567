"""What depends on the device: precision, kernels, the backend, how checkpoints are written."""

import importlib.util
from argparse import Namespace
from typing import Any

from loongplug.training.rules.rule import Rule


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


def optimizer(args: Namespace, model: Any) -> str | None:
    """The optimizer is one whose state can be sharded module by module."""
    return None if args.optimizer in ("adam", "sgd") else f"--optimizer {args.optimizer}"


RULES: tuple[Rule, ...] = (
    Rule(
        name="optimizer",
        refuses="an `--optimizer` other than `adam` and `sgd`",
        check=optimizer,
        reason="the others gather parameters in a way that modules with layouts of their own "
        "have not",
        cure="drop the flag for adam",
    ),
    Rule(
        name="precision",
        refuses="`--fp16`, `--fp8-format`, `--fp4-format`",
        check=precision,
        reason="the models are trained in bf16; smaller ranges and formats are not tested",
        cure="use --bf16, or no flag for fp32",
    ),
    Rule(
        name="checkpoint-format",
        refuses="`--ckpt-format` other than `torch_dist`",
        check=checkpoint_format,
        reason="only torch_dist checkpoints load into another layout",
        cure="drop the flag",
    ),
    Rule(
        name="asynchronous-save",
        refuses="`--async-strategy nvrx` with `--async-save` on CPU, or without the package "
        "nvidia-resiliency-ext",
        check=asynchronous_save,
        reason="that writer needs a GPU and its package",
        cure="drop the flag: the writer is chosen by what is there",
    ),
    Rule(
        name="backend",
        refuses="`nccl` on CPU, `gloo` on CUDA",
        check=backend,
        reason="the backend follows the device",
        cure="drop --distributed-backend, or choose by --device",
    ),
    Rule(
        name="transformer-engine",
        refuses="a `--transformer-impl` that the machine does not have",
        check=transformer_engine,
        reason="TransformerEngine runs on CUDA, where it is installed; inference has no backward",
        cure="drop the flag: TransformerEngine is used where it is there",
    ),
)
