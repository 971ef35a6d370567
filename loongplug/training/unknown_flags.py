"""What is said of flags that there are not: ours for those of other trainers, else the closest."""

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NoReturn

from loongplug.training.typed import closest

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_EVERY_LINEAR = "model.foundation.lora.target_modules=[linear_qkv]; without it, every linear"
_FOLDER = "--load-hf {}, a downloaded folder"
_ADAPTERS = "model.foundation.lora.rank=8 for LoRA; without it, all parameters train"
_PRECISION = "--bf16, which takes no value; without it, fp32"
_KERNELS = "leave it out: loongplug doctor says what attention is computed by"

# Flags of ms-swift, LLaMA-Factory, transformers and TRL in our words; {} is the value given.
OURS: Mapping[str, str] = MappingProxyType(
    {
        # The model, and which of it trains.
        "model": _FOLDER,
        "model-name-or-path": _FOLDER,
        "torch-dtype": _PRECISION,
        "dtype": _PRECISION,
        "attn-impl": _KERNELS,
        "attn-implementation": _KERNELS,
        "flash-attn": _KERNELS,
        "train-type": _ADAPTERS,
        "tuner-type": _ADAPTERS,
        "finetuning-type": _ADAPTERS,
        "use-peft": _ADAPTERS,
        "lora-rank": "model.foundation.lora.rank={}",
        "lora-r": "model.foundation.lora.rank={}",
        "lora-alpha": "model.foundation.lora.alpha={}",
        "lora-dropout": "model.foundation.lora.dropout={}",
        "lora-target": _EVERY_LINEAR,
        "lora-target-modules": _EVERY_LINEAR,
        "target-modules": _EVERY_LINEAR,
        "adapters": "--load-lora {}",
        "adapter-name-or-path": "--load-lora {}",
        "freeze-vit": "model.image_encoder.freeze={}",
        "freeze-vision-tower": "model.image_encoder.freeze={}",
        "freeze-aligner": "model.image_projector.freeze={}",
        "freeze-multi-modal-projector": "model.image_projector.freeze={}",
        "freeze-llm": "model.foundation.freeze={}",
        "freeze-language-model": "model.foundation.freeze={}",
        "vit-lr": "model.image_encoder.lr_mult=X, a multiple of --lr",
        "aligner-lr": "model.image_projector.lr_mult=X, a multiple of --lr",
        # Data.
        "dataset": "--train-data-path {}",
        "train-file": "--train-data-path {}",
        "dataset-name": "--train-data-path {}",
        "val-dataset": "--valid-data-path {}",
        "eval-dataset": "--valid-data-path {}",
        "template": "leave it out: the chat template is that of the model's folder",
        "max-length": "--seq-length {}",
        "max-seq-length": "--seq-length {}",
        "model-max-length": "--seq-length {}",
        "cutoff-len": "--seq-length {}",
        "neat-packing": "--packing",
        "image-max-pixels": "--max-pixels {}",
        "media-dir": "--media-root {}",
        "dataloader-num-workers": "--num-workers {}",
        "stage": "--training-phase sft, or pretrain for loss on all text",
        "assistant-only-loss": "--training-phase sft",
        # The schedule.
        "learning-rate": "--lr {}",
        "num-train-epochs": "--epochs {}",
        "max-steps": "--train-iters {}",
        "lr-scheduler-type": "--lr-decay-style {}",
        "warmup-ratio": "--lr-warmup-fraction {}",
        "warmup-steps": "--lr-warmup-iters {}",
        "max-grad-norm": "--clip-grad {}",
        "optim": "--optimizer adam, which is AdamW",
        # The machine.
        "gradient-checkpointing": _RECOMPUTE,
        "deepspeed": "--use-distributed-optimizer, as ZeRO 1",
        "fsdp": "--use-distributed-optimizer, as ZeRO 1",
        "sequence-parallel-size": "--context-parallel-size {}",
        "nproc-per-node": "--ranks {}, in front of all others",
        # What a run leaves.
        "output-dir": "--save {} for checkpoints, --save-hf DIR for a Hugging Face folder",
        "resume-from-checkpoint": "--load {}",
        "save-steps": "--save-interval {}",
        "save-total-limit": "--keep-checkpoints {}",
        "eval-steps": "--eval-interval {}",
        "logging-steps": "--log-interval {}",
        "report-to": "--tensorboard-dir DIR, or --wandb-project NAME",
        "run-name": "--wandb-exp-name {}",
        "predict-with-generate": "--eval-generate N",
        "do-train": "leave it out: a run trains, and evaluates by --valid-data-path",
        "overwrite-output-dir": "leave it out: a run goes on by --load, and else wants a new folder",
    }
)
PER_DEVICE = ("per-device-train-batch-size", "per-device-batch-size")
ACCUMULATION = "gradient-accumulation-steps"


def refuse_unknown(
    left_over: Sequence[str], known: Collection[str], args: Namespace, *, ranks: int | None
) -> NoReturn:
    """Raise ValueError with one line for each flag of ``left_over``, none of which is ``known``.

    What stands behind one counts as its value. ``args`` are the other flags, and ``ranks`` how many
    the run has, if that is known.
    """
    problems = []
    unknown: dict[str, str] = {}
    for token in left_over:
        if token.startswith("-"):
            flag, _, value = token.partition("=")
            unknown[flag] = value
        elif token.lower() in ("true", "false") and (not unknown or unknown[flag]):
            problems.append(f"{token} belongs to no flag: switches such as --bf16 take no value")
        elif unknown:
            unknown[flag] = f"{unknown[flag]} {token}".strip()
        else:
            problems.append(f"{token} belongs to no flag and is not an override key=value")
    theirs = {_plain(flag): value for flag, value in unknown.items()}
    together: dict[str, list[str]] = {}
    for flag in unknown:
        said = in_our_words(_plain(flag), theirs, args, ranks=ranks) or _closest(flag, known)
        together.setdefault(said, []).append(flag)
    problems += [f"there is no flag {', '.join(flags)}; {said}" for said, flags in together.items()]
    raise ValueError("\n".join(problems))


def in_our_words(
    name: str, theirs: Mapping[str, str], args: Namespace, *, ranks: int | None
) -> str | None:
    """What ``name``, one of the flags with values ``theirs``, is here; None for what is unknown."""
    if name in (*PER_DEVICE, ACCUMULATION):
        return _batch(theirs, args, ranks=ranks)
    words, value = OURS.get(name), theirs[name]
    if words is None or words.startswith("leave it out"):
        return words
    if value.lower() == "false" and "{}" not in words:
        return "leave it out"
    return f"here it is {words.format(value.lower() if '.freeze=' in words else value or 'VALUE')}"


def _batch(theirs: Mapping[str, str], args: Namespace, *, ranks: int | None) -> str:
    """The sizes of a batch, by arithmetic where all is known."""
    given = next((theirs[each] for each in PER_DEVICE if theirs.get(each, "").isdecimal()), None)
    micro = int(given) if given else args.micro_batch_size
    times = theirs.get(ACCUMULATION, "1")
    split = [
        getattr(args, f"{each}_parallel_size") or 1
        for each in ("tensor_model", "pipeline_model", "context")
    ]
    if micro is None or ranks is None or ranks % prod(split) or not times.isdecimal():
        return (
            f"here it is --micro-batch-size {micro or 'B'} --global-batch-size G, where G is"
            f" {micro or 'B'} x replicas x {times or 1} of accumulation, and replicas are"
            " ranks / (tp x pp x cp)"
        )
    replicas = ranks // prod(split)
    tp, pp, cp = split
    return (
        f"here it is --micro-batch-size {micro} --global-batch-size {micro * replicas * int(times)}"
        f": {micro} x {replicas} replicas ({ranks} ranks / (tp {tp} x pp {pp} x cp {cp}))"
        f" x {times} of accumulation"
    )


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()


def _closest(flag: str, known: Collection[str]) -> str:
    options = {option.lstrip("-"): option for option in known}
    match = closest(_plain(flag), options)
    return f"the closest is {options[match]}" if match else "--help-all lists them all"
