"""What is said of flags that there are not: ours for those of other trainers, else the closest."""

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from loongplug.training.typed import closest

# Flags of ms-swift, LLaMA-Factory, transformers and TRL in our words; {} is the value given.
_OURS = {
    # The model, and which of it trains.
    "model model-name-or-path": "--load-hf {}, a downloaded folder",
    "torch-dtype dtype": "--bf16, which takes no value; without it, fp32",
    "attn-impl attn-implementation flash-attn": "leave it out: loongplug doctor says what computes",
    "train-type tuner-type finetuning-type use-peft": "model.foundation.lora.rank=8 for LoRA;"
    " without it, all parameters train",
    "lora-rank lora-r": "model.foundation.lora.rank={}",
    "lora-alpha": "model.foundation.lora.alpha={}",
    "lora-dropout": "model.foundation.lora.dropout={}",
    "lora-target lora-target-modules target-modules": "model.foundation.lora.target_modules="
    "[linear_qkv]; without it, every linear",
    "adapters adapter-name-or-path": "--load-lora {}",
    "freeze-vit freeze-vision-tower": "model.image_encoder.freeze={}",
    "freeze-aligner freeze-multi-modal-projector": "model.image_projector.freeze={}",
    "freeze-llm freeze-language-model": "model.foundation.freeze={}",
    "vit-lr": "model.image_encoder.lr_mult=X, a multiple of --lr",
    "aligner-lr": "model.image_projector.lr_mult=X, a multiple of --lr",
    # Data.
    "dataset train-file dataset-name": "--train-data-path {}",
    "val-dataset eval-dataset": "--valid-data-path {}",
    "split-dataset-ratio val-size": "--valid-share {}",
    "template": "leave it out: the chat template is that of the model's folder",
    "max-length max-seq-length model-max-length cutoff-len": "--seq-length {}",
    "neat-packing": "--packing",
    "image-max-pixels": "--max-pixels {}",
    "media-dir": "--media-root {}",
    "dataloader-num-workers": "--num-workers {}",
    "preprocessing-num-workers dataset-num-proc": "leave it out: rows are read as they are needed",
    "dataset-dir": "leave it out: --train-data-path has whole paths",
    "stage": "--training-phase sft, or pretrain for loss on all text",
    "assistant-only-loss": "--training-phase sft where true, or pretrain for loss on all text",
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
    "gradient-checkpointing": "--recompute-granularity full --recompute-method uniform"
    " --recompute-num-layers 1",
    "per-device-eval-batch-size": "leave it out: validation takes --micro-batch-size",
    "ddp-timeout": "--distributed-timeout-minutes N",
    "deepspeed fsdp": "--use-distributed-optimizer, as ZeRO 1",
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
    "eval-strategy": "--eval-interval N",
    "save-strategy": "--save-interval N",
    "do-train": "leave it out: a run trains, and evaluates by --valid-data-path",
    "overwrite-output-dir": "leave it out: a run goes on by --load, and else writes anew",
}
OURS = MappingProxyType({name: said for names, said in _OURS.items() for name in names.split()})
PER_DEVICE, ACCUMULATION = "per-device-train-batch-size", "gradient-accumulation-steps"


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
        if token.startswith("-") and not token[1:2].isdigit():
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
        match = closest(f"--{_plain(flag)}", known)
        other = f"the closest is {match}" if match else "--help-all lists them all"
        said = in_our_words(_plain(flag), theirs, args, ranks=ranks) or other
        together.setdefault(said, []).append(flag)
    problems += [f"there is no flag {', '.join(flags)}; {said}" for said, flags in together.items()]
    raise ValueError("\n".join(problems))


def in_our_words(
    name: str, theirs: Mapping[str, str], args: Namespace, *, ranks: int | None
) -> str | None:
    """What ``name``, one of the flags with values ``theirs``, is here; None for what is unknown."""
    if name in (PER_DEVICE, ACCUMULATION):
        return f"here it is {_batch(theirs, args, ranks=ranks)}"
    words, value = OURS.get(name), theirs[name]
    if words is None or words.startswith("leave it out"):
        return words
    if value.lower() == "false" and not {"{}", "true,"} & {*words.split()}:
        return "leave it out"
    return f"here it is {words.format(value.lower() if '.freeze=' in words else value or 'VALUE')}"


def _batch(theirs: Mapping[str, str], args: Namespace, *, ranks: int | None) -> str:
    """The sizes of a batch, by arithmetic where all is known."""
    micro = theirs.get(PER_DEVICE) or args.micro_batch_size or "B"
    times = theirs.get(ACCUMULATION) or "1"
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    tp, pp, cp = (size or 1 for size in (*sizes, args.context_parallel_size))
    replicas, rest = divmod(ranks or 1, tp * pp * cp)
    if ranks is None or rest or not f"{micro}{times}".isdecimal():
        whole = f"G, where G is {micro} x replicas x {times} of accumulation, and replicas are"
        return f"--micro-batch-size {micro} --global-batch-size {whole} ranks / (tp x pp x cp)"
    whole = f"{int(micro) * replicas * int(times)}: {micro} x {replicas} replicas ({ranks} ranks"
    return (
        f"--micro-batch-size {micro} --global-batch-size {whole} / (tp {tp} x pp {pp} x cp {cp}))"
        f" x {times} of accumulation"
    )


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-").lower()
