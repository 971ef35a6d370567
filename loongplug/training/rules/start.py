"""What every run has to say: its length and rates, its tokenizer, where it starts from."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from loongplug.models.registry import family_of
from loongplug.training.rules.rule import Rule
from loongplug.training.special_tokens import read_tokenizer, token_problems

# What a run writes before its export.
WRITTEN = (
    *("--save", "--trace", "--metrics-json", "--tensorboard-dir"),
    *("--non-persistent-global-ckpt-dir", "--non-persistent-local-ckpt-dir"),
)
HF_OWN_FOLDER = "give the export a folder of its own"


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
        "eval_micro_batch_size",
        "eval_global_batch_size",
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


def hf_own_folder(args: Namespace, model: Any) -> str | None:
    """What a run writes on its way leaves the folder of ``--save-hf`` to the export."""
    return within_hf_folder(args)


def within_hf_folder(args: Namespace) -> str | None:
    """What else is written to or into ``--save-hf``, which an export replaces; of train.py's args.

    A checkpoint's folder may have others in it: its own files are all named by iterations.
    """
    if not args.save_hf:
        return None
    export = Path(args.save_hf).resolve()
    for flag in WRITTEN:
        given = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if given and Path(given).resolve().is_relative_to(export):
            return f"{flag} {given} with --save-hf {args.save_hf}"
    return None


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


RULES: tuple[Rule, ...] = (
    Rule(
        name="required-flags",
        refuses="`--training-phase`, `--seq-length`, `--micro-batch-size`, `--lr` or "
        "`--train-iters` is missing",
        check=required_flags,
        reason="a run is not defined without them",
        cure="add them",
    ),
    Rule(
        name="positive-numbers",
        refuses="a parallel size, batch size, length or interval below 1",
        check=positive_numbers,
        reason="they count things",
        cure="give 1 or more",
    ),
    Rule(
        name="tokenizer-folder",
        refuses="`--tokenizer-model` is missing, or is no folder with a `tokenizer.json`",
        check=tokenizer_folder,
        reason="text and special tokens come from it",
        cure="give the folder of a Hugging Face tokenizer",
    ),
    Rule(
        name="tokenizer-fits",
        refuses="the tokenizer lacks the model's special tokens, gives them other ids, or has more "
        "ids than `vocab_size`",
        check=tokenizer_fits,
        reason="images would not be found among the tokens, or tokens not in the embedding",
        cure="use the model's own tokenizer, or set the ids (null: the tokenizer's) and "
        "model.foundation.vocab_size",
    ),
    Rule(
        name="hf-folder",
        refuses="`--load-hf` is no folder with a `config.json`",
        check=hf_folder,
        reason="it is no Hugging Face checkpoint",
        cure="give a folder that transformers' from_pretrained takes",
    ),
    Rule(
        name="checkpoint-to-load",
        refuses="`--load` has no checkpoint, and is neither `--save` nor beside `--load-hf`",
        check=checkpoint_to_load,
        reason="the run would start from random weights without a word",
        cure="correct the folder; to start a run that can resume, give --save the same folder",
    ),
    Rule(
        name="hf-own-folder",
        refuses="`--save`, `--trace`, `--metrics-json` or another folder that a run writes to, as "
        "or in that of `--save-hf`",
        check=hf_own_folder,
        reason="an export replaces its whole folder, and nothing that is not its own",
        cure=HF_OWN_FOLDER,
    ),
    Rule(
        name="learning-rates",
        refuses="`--min-lr` above `--lr`",
        check=learning_rates,
        reason="the rate decays from the one to the other",
        cure="lower --min-lr",
    ),
    Rule(
        name="warm-up",
        refuses="`--lr-warmup-iters` not below `--lr-decay-iters` (or `--train-iters`)",
        check=warmup,
        reason="the learning rate would never decay",
        cure="shorten the warm-up or lengthen the run",
    ),
    Rule(
        name="sequence-length",
        refuses="`--seq-length` above the model's `max_position_embeddings`",
        check=sequence_length,
        reason="the model knows no later positions",
        cure="shorten it, or raise model.foundation.max_position_embeddings",
    ),
)
