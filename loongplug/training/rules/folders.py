"""Data, and the folders that a run reads its weights and tokenizer from and writes to."""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from loongplug.checkpoint.export_folder import is_half_replaced
from loongplug.data.media_files import is_remote
from loongplug.data.schemas import LEAST_FPS
from loongplug.models.registry import family_of
from loongplug.training.rules.rule import (
    Choice,
    Problems,
    any_of,
    evaluates,
    excludes,
    flag,
    needs,
    number,
    rule,
    value_of,
)
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


@rule(reason="it names no place, and would be left aside", cure="give one, or drop the flag")
def empty_places(args: Namespace, model: Any) -> Problems:
    """a file or folder that is named by an empty text"""
    for name in (*WRITTEN, *READ, "--save-hf", "--save-lora"):
        if value_of(args, name) in ("", [""]):
            yield name


@rule(reason="there are no checkpoints, or two flags say which stay", cure="give --save, and one")
def kept_checkpoints(args: Namespace, model: Any) -> Problems:
    """`--keep-checkpoints` without `--save`, or with `--save-retain-interval`"""
    if not args.keep_checkpoints:
        return
    if not args.save:
        yield "--keep-checkpoints without --save"
    elif args.save_retain_interval is not None:
        yield "--keep-checkpoints with --save-retain-interval"


@rule(
    reason="text and special tokens come from it",
    cure="give the folder of a Hugging Face tokenizer",
)
def tokenizer_folder(args: Namespace, model: Any) -> Problems:
    """`--tokenizer-model` is missing, or is not a folder with a `tokenizer.json`"""
    if args.tokenizer_model is None:
        yield "--tokenizer-model not given"
        return
    try:
        read_tokenizer(Path(args.tokenizer_model))
    except ValueError as error:
        yield f"--tokenizer-model: {error}"


@rule(
    reason="images would not be found among the tokens, or tokens not in the embedding",
    cure="use the model's own tokenizer, or set the ids (null: the tokenizer's) and "
    "model.foundation.vocab_size",
)
def tokenizer_fits(args: Namespace, model: Any) -> Problems:
    """the tokenizer lacks the model's special tokens, gives them other ids, or has more ids than
    `vocab_size`
    """
    if tokenizer_folder(args, model) is not None:
        return
    tokenizer, known = read_tokenizer(Path(args.tokenizer_model)), args.padded_vocab_size
    family = family_of(type(model), trusted_packages=args.trusted_packages)
    yield from token_problems(model, tokenizer, special_tokens=family.special_tokens)
    if tokenizer.size > known:
        yield f"the tokenizer has {tokenizer.size} ids, but the model's vocabulary {known}"


@rule(
    reason="it is not a Hugging Face checkpoint",
    cure="give a folder that transformers' from_pretrained takes",
    verified=False,  # verify's own weights are of any model, also of one that transformers lacks
)
def hf_folder(args: Namespace, model: Any) -> Problems:
    """`--load-hf` is not a folder with a `config.json`"""
    if args.load_hf is None or (Path(args.load_hf) / "config.json").is_file():
        return
    cut_short = (
        ": an export that was to take its place was cut short; the same export, started again, "
        "puts it back"
    )
    why = cut_short if is_half_replaced(Path(args.load_hf)) else ""
    yield f"--load-hf {args.load_hf} has no config.json{why}"


@rule(
    reason="the run would start from random weights without a word",
    cure="correct the folder; to start a run that can resume, give --save the same folder",
)
def checkpoint_to_load(args: Namespace, model: Any) -> Problems:
    """`--load` has no checkpoint, and is neither `--save` nor beside `--load-hf`"""
    if args.load is None or args.load == args.save or args.load_hf:
        return
    if not (Path(args.load) / "latest_checkpointed_iteration.txt").is_file():
        yield f"--load {args.load} has no checkpoint"


@rule(
    reason="an export replaces its own files there, and has to find them as it wrote them",
    cure="give each export a folder of its own",
)
def own_folder(args: Namespace, model: Any) -> Problems:
    """what a run writes or reads as or in the folder of `--save-hf` or `--save-lora`, adapters in
    that of `--save-hf` or around it; the working directory in one of the two

    A checkpoint's folder may have adapters in it: its own files are all named by iterations.
    """
    hf, lora = (value_of(args, each) for each in ("--save-hf", "--save-lora"))
    if hf and lora and Path(lora).resolve().is_relative_to(Path(hf).resolve()):
        yield f"--save-lora {lora} with --save-hf {hf}"
        return
    for name, folder, others in (("--save-hf", hf, ()), ("--save-lora", lora, ("--save-hf",))):
        if not folder:
            continue
        export = Path(folder).resolve()
        for other in (*others, *WRITTEN, *READ):
            given = value_of(args, other) or ()
            for value in given if isinstance(given, list) else [given]:
                if value and Path(value).resolve().is_relative_to(export):
                    yield f"{other} {value} with {name} {folder}"
                    return
        if Path.cwd().is_relative_to(export):
            yield f"{name} {folder} is the working directory or above it"


@rule(
    reason="it would not be known what to train on",
    cure="give --train-data-path FILE (or FILE FILE, or WEIGHT FILE WEIGHT FILE), and "
    "--valid-data-path FILE for held-out data",
    training_only=True,
)
def data_given(args: Namespace, model: Any) -> Problems:
    """no training data, or `--data-path` beside `--train-data-path` or `--valid-data-path`"""
    if not args.data_path and not args.train_data_path:
        yield "no training data given"
    elif args.data_path and (args.train_data_path or args.valid_data_path):
        yield "--data-path given beside --train-data-path or --valid-data-path"


@rule(reason="there are no media", cure="correct the path")
def media_root(args: Namespace, model: Any) -> Problems:
    """a `--media-root` that does not exist"""
    root = args.media_root
    if root is not None and not is_remote(root) and not Path(root).is_dir():
        yield f"{root} not found"


@rule(
    refuses=f"`--video-fps` below {LEAST_FPS:g}",
    reason="it is the number of frames taken per second of a video, and slower ones have times "
    "beyond what positions can count",
    cure=f"give {LEAST_FPS:g} or more",
    training_only=True,
)
def video_rate(args: Namespace, model: Any) -> Problems:
    rate = args.video_fps
    if rate is not None and math.isfinite(rate) and rate < LEAST_FPS:
        yield f"--video-fps {rate:g}"


packing_rows = excludes(
    flag("--packing"),
    any_of(
        number("--micro-batch-size", above=1),
        number("--eval-micro-batch-size", above=1),
        joined=" and ",
    ),
    reason="a pack is a microbatch of several samples already",
    cure="use --micro-batch-size 1, and a longer --seq-length for more samples at once",
)
split_rows = needs(
    flag("--multi-turn split"),
    flag("--packing"),
    reason="the renderings of a row are segments of a pack",
    cure="add --packing, or drop the flag: the answers behind each row's last question are trained",
)


validation = needs(
    any_of(number("--eval-iters", above=0), number("--eval-generate", above=0)),
    Choice(
        said=lambda args: str((evaluates(args) and args.eval_iters != 0) or ""),
        in_docs="validation data",
    ),
    reason="there would be nothing to evaluate on, and nothing to answer",
    cure="give --valid-data-path FILE or --valid-share, and no --eval-iters 0, or drop the flag",
    training_only=True,
)
valid_share = excludes(
    flag("--valid-share"),
    flag("--valid-data-path"),
    reason="validation has rows of its own, or some of the training data's",
    cure="give one of the two",
)
