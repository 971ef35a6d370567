"""What every run has to say: its length and rates, its tokenizer, where it starts from."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loongplug.checkpoint.export_folder import is_half_replaced
from loongplug.models.registry import family_of
from loongplug.training.rules.rule import rule, value_of
from loongplug.training.special_tokens import read_tokenizer, token_problems

# What a run writes before its export.
WRITTEN = (
    *("--save", "--trace", "--metrics-json", "--tensorboard-dir"),
    *("--non-persistent-global-ckpt-dir", "--non-persistent-local-ckpt-dir"),
)
# What a run reads; the values of data flags may be weights, too, which name no file of an export.
READ = (
    *("--load-hf", "--load-lora", "--load", "--tokenizer-model", "--config-file", "--media-root"),
    *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
)
# Numbers below 1 of which make no run.
_COUNTS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size"),
    *("--expert-tensor-parallel-size", "--seq-length", "--packing-look-ahead"),
    *("--max-row-mib", "--micro-batch-size", "--global-batch-size"),
    *("--eval-micro-batch-size", "--eval-global-batch-size", "--train-iters", "--epochs"),
    *("--save-interval", "--log-interval", "--eval-interval", "--keep-checkpoints"),
    "--ckpt-step",
)


@rule(reason="a run is not defined without them", cure="add them")
def required_flags(args: Namespace, model: Any) -> str | None:
    """`--training-phase`, `--seq-length`, `--micro-batch-size`, `--lr` or both of `--train-iters`
    and `--epochs` are missing
    """
    needed = ["--training-phase", "--seq-length", "--micro-batch-size", "--lr"]
    if args.epochs is None:
        needed.append("--train-iters")
    missing = [flag for flag in needed if value_of(args, flag) is None]
    return f"{', '.join(missing)} not given" if missing else None


@rule(reason="both say when the run ends", cure="give one of the two")
def run_length(args: Namespace, model: Any) -> str | None:
    """`--epochs` with `--train-iters`"""
    both = args.epochs is not None and args.train_iters is not None
    return f"--epochs {args.epochs} with --train-iters {args.train_iters}" if both else None


@rule(reason="they count things", cure="give 1 or more")
def positive_numbers(args: Namespace, model: Any) -> str | None:
    """a parallel size, batch size, length or interval, or `--ckpt-step`, below 1"""
    wrong = [
        f"{flag} is {value}"
        for flag in _COUNTS
        if (value := value_of(args, flag)) is not None and value < 1
    ]
    return ", ".join(wrong) or None


@rule(reason="it names no place, and would be left aside", cure="give one, or drop the flag")
def empty_places(args: Namespace, model: Any) -> str | None:
    """a file or folder that is named by an empty text"""
    flags = (*WRITTEN, *READ, "--save-hf", "--save-lora")
    found = [flag for flag in flags if (value := value_if_any(args, flag)) == "" or value == [""]]
    return ", ".join(found) or None


@rule(reason="there are no checkpoints, or two flags say which stay", cure="give --save, and one")
def kept_checkpoints(args: Namespace, model: Any) -> str | None:
    """`--keep-checkpoints` without `--save`, or with `--save-retain-interval`"""
    if not args.keep_checkpoints:
        return None
    if not args.save:
        return "--keep-checkpoints without --save"
    both = args.save_retain_interval is not None
    return "--keep-checkpoints with --save-retain-interval" if both else None


@rule(
    reason="text and special tokens come from it",
    cure="give the folder of a Hugging Face tokenizer",
)
def tokenizer_folder(args: Namespace, model: Any) -> str | None:
    """`--tokenizer-model` is missing, or is not a folder with a `tokenizer.json`"""
    if args.tokenizer_model is None:
        return "--tokenizer-model not given"
    try:
        read_tokenizer(Path(args.tokenizer_model))
    except ValueError as error:
        return f"--tokenizer-model: {error}"
    return None


@rule(
    reason="images would not be found among the tokens, or tokens not in the embedding",
    cure="use the model's own tokenizer, or set the ids (null: the tokenizer's) and "
    "model.foundation.vocab_size",
)
def tokenizer_fits(args: Namespace, model: Any) -> str | None:
    """the tokenizer lacks the model's special tokens, gives them other ids, or has more ids than
    `vocab_size`
    """
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


@rule(
    reason="it is not a Hugging Face checkpoint",
    cure="give a folder that transformers' from_pretrained takes",
    verified=False,  # verify's own weights are of any model, also of one that transformers lacks
)
def hf_folder(args: Namespace, model: Any) -> str | None:
    """`--load-hf` is not a folder with a `config.json`"""
    if args.load_hf is None or (Path(args.load_hf) / "config.json").is_file():
        return None
    if is_half_replaced(Path(args.load_hf)):
        return (
            f"--load-hf {args.load_hf} has no config.json: an export that was to take its place "
            "was cut short; the same export, started again, puts it back"
        )
    return f"--load-hf {args.load_hf} has no config.json"


@rule(
    reason="the run would start from random weights without a word",
    cure="correct the folder; to start a run that can resume, give --save the same folder",
)
def checkpoint_to_load(args: Namespace, model: Any) -> str | None:
    """`--load` has no checkpoint, and is neither `--save` nor beside `--load-hf`"""
    if args.load is None or args.load == args.save or args.load_hf:
        return None
    if (Path(args.load) / "latest_checkpointed_iteration.txt").is_file():
        return None
    return f"--load {args.load} has no checkpoint"


@rule(
    reason="an export replaces its own files there, and has to find them as it wrote them",
    cure="give the export a folder of its own",
)
def hf_own_folder(args: Namespace, model: Any) -> str | None:
    """`--save`, `--trace`, `--metrics-json` or another folder that a run writes to, or weights,
    adapters, a tokenizer, data, media or a config that it reads, as or in that of `--save-hf`;
    the working directory in it
    """
    return within_export(args, flag="--save-hf", written=WRITTEN)


def within_export(args: Namespace, *, flag: str, written: Sequence[str]) -> str | None:
    """What stands in the way of an export to ``flag``'s folder, files of ``written`` among it.

    A checkpoint's folder may have others in it: its own files are all named by iterations.
    """
    folder = value_if_any(args, flag)
    if not folder:
        return None
    export = Path(folder).resolve()
    for other in (*written, *READ):
        given = value_if_any(args, other) or ()
        for value in given if isinstance(given, list) else [given]:
            if value and Path(value).resolve().is_relative_to(export):
                return f"{other} {value} with {flag} {folder}"
    if Path.cwd().is_relative_to(export):
        return f"{flag} {folder} is the working directory or above it"
    return None


def value_if_any(args: Namespace, flag: str) -> Any:
    """What was given for a flag; None where these arguments do not have it."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


@rule(reason="the rate decays from the one to the other", cure="lower --min-lr")
def learning_rates(args: Namespace, model: Any) -> str | None:
    """`--min-lr` above `--lr`"""
    if args.lr is None or not args.min_lr > args.lr:
        return None
    return f"--min-lr {args.min_lr} is above --lr {args.lr}"


@rule(
    reason="the learning rate would never decay",
    cure="shorten the warm-up or lengthen the run",
)
def warm_up(args: Namespace, model: Any) -> str | None:
    """`--lr-warmup-iters` not below `--lr-decay-iters` (or `--train-iters`)"""
    end = args.lr_decay_iters or args.train_iters
    if end is None or end < 1 or args.lr_warmup_iters < end:
        return None
    return f"--lr-warmup-iters {args.lr_warmup_iters} does not end before iteration {end}"


@rule(
    reason="the model knows no later positions",
    cure="shorten it, or raise model.foundation.max_position_embeddings",
)
def sequence_length(args: Namespace, model: Any) -> str | None:
    """`--seq-length` above the model's `max_position_embeddings`"""
    if args.seq_length is None or args.seq_length <= args.max_position_embeddings:
        return None
    return f"--seq-length {args.seq_length} exceeds the model's {args.max_position_embeddings}"
