"""The block that a run prints at its start, and the one at its end: what it does, where, what next.

A fact is a label and what it says. A label that is empty goes on with the one above.
"""

import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from loongplug.data.blend import parse_blend
from loongplug.data.sample_order import StepSizes
from loongplug.hetero.modes import modes_of
from loongplug.models.freezing import Freezing
from loongplug.models.hf_mapping import Mapping, is_carried
from loongplug.training.arguments import ParsedArguments
from loongplug.training.checkpoints import has_checkpoint, tracked_iteration
from loongplug.training.config import shown_name
from loongplug.training.datasets import DatasetProvider
from loongplug.training.rows import TRAINING, training_files
from loongplug.training.rules.hetero import encoder_tp
from loongplug.training.rules.rule import data_parallel_size
from loongplug.training.step_sizes import step_sizes

Fact = tuple[str, str]

_FLAGS = "--save DIR keeps checkpoints, --save-hf DIR the model for transformers"


def print_facts(facts: Iterable[Fact], *, args: Namespace, file: TextIO) -> None:
    """Print a line for each, by the first rank: bold labels on a terminal, no breaks of our own."""
    console = Console(file=file, highlight=False)
    for label, text in facts if args.rank == 0 else ():
        console.print(Text.assemble((f"{label:<12}", "bold"), text), soft_wrap=True)


def start_facts(
    parsed: ParsedArguments,
    *,
    mapping: Mapping,
    freezing: Freezing,
    datasets: DatasetProvider,
    logs: Path | None,
) -> Iterator[Fact]:
    """The facts of a run that is about to begin; ``mapping`` has adapters' parameters, too."""
    args, model, interval = parsed.args, parsed.model, parsed.args.save_interval
    yield from _modules(args, model, mapping=mapping, freezing=freezing)
    yield "layout", _layout(args, model)
    yield "rows", _rows(args, datasets)
    if datasets.evaluation is not None:
        yield "validation", f"{_when(args.eval_interval, args)}: {datasets.evaluation}"
    yield "start", _start(args)
    saved = [f"checkpoints to {args.save} {_when(interval, args)}"] if args.save else []
    saved += [f"{what} to {folder} at the end" for what, folder in _exports(args)]
    yield "saves", "; ".join(saved) or f"nothing: {_FLAGS}"
    places = {
        "Megatron's of each rank": logs,
        "TensorBoard": args.tensorboard_dir,
        "wandb": args.wandb_project and f"{args.wandb_save_dir}/wandb",
        "trace": args.trace,
        "figures": args.metrics_json,
    }
    if told := [f"{what} in {place}" for what, place in places.items() if place]:
        yield "logs", "; ".join(told)


def end_facts(args: Namespace, *, ended_early: bool = False) -> Iterator[Fact]:
    """The facts of a run that has written all; one that ``ended_early`` has exported nothing."""
    saved = [] if ended_early else _exports(args)
    if args.save and (last := tracked_iteration(args.save)):
        saved.insert(0, (f"iteration {last}", args.save))
    for what, folder in saved:
        yield "saved", f"{what} in {folder}"
    if not saved:
        yield "saved", f"nothing; in another run, {_FLAGS}"
    elif not ended_early:
        folders = [folder for _, folder in saved]
        # Adapters alone lack what trained beside them.
        whole = (each for each in (args.save_hf, args.save, args.save_lora) if each in folders)
        yield "next", _evaluation(args, next(whole))
    if saved and args.save:
        more = "" if ended_early else " and more --train-iters or --epochs"
        more += ", without --finetune" if args.finetune else ""
        yield "going on", f"the same command with --load {shlex.quote(args.save)}{more}"


def _modules(
    args: Namespace, model: Any, *, mapping: Mapping, freezing: Freezing
) -> Iterator[Fact]:
    sizes, trained = Counter[str](), Counter[str]()
    for each in mapping.entries():
        if is_carried(each.name):
            continue
        module = each.name.partition(".")[0]
        size = sum(prod(source.matrix) for source in each.sources)
        sizes[module] += size
        trained[module] += size * freezing.trains(each.name)
    told = f"{_count(sizes.total())} parameters, {_count(trained.total())} train"
    yield "model", f"{shown_name(args)}: {told}, {'bf16' if args.bf16 else 'fp32'}"
    for name, module in model.modules().items():
        what = f"{_count(trained[name])} train"
        if trained[name] in (0, sizes[name]):
            what = "trains" if trained[name] else "frozen"
        words = [f"{model.keys[name]}: {_count(sizes[name])}", what]
        words += [f"LoRA of rank {module.lora.rank}"] if module.lora is not None else []
        words += [f"lr_mult {module.lr_mult:g}"] if module.lr_mult != 1.0 else []
        yield "", ", ".join(words)


def _count(number: int) -> str:
    """A number of parameters in a few digits, such as 834 k or 8.19 B."""
    units = ((10**9, " B"), (10**6, " M"), (10**3, " k"), (1, ""))
    return next((f"{number / n:.3g}{unit}" for n, unit in units if number >= n), "0")


def _layout(args: Namespace, model: Any) -> str:
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "VPP": args.virtual_pipeline_model_parallel_size or 1,
        "DP": data_parallel_size(args),
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size,
    }
    shown = ", ".join(_above_one(sizes))
    encoders = [_encoder_layout(args, model, name) for name in model.encoders]
    ranks = f"{args.ranks} ranks" if args.ranks > 1 else "1 rank"
    return "; ".join((f"{ranks} on {args.device}", *filter(None, (shown,)), *encoders))


def _encoder_layout(args: Namespace, model: Any, name: str) -> str:
    encoder, words = model.encoder(name), [modes_of(args, model)[name].name]
    tp = encoder_tp(args, encoder)
    words += [] if encoder.rank_offset is None else [f"from rank {encoder.rank_offset} on"]
    words += [f"TP {tp}"] if tp != args.tensor_model_parallel_size else []
    sizes = {"PP": encoder.pipeline_model_parallel_size, "DP": encoder.data_parallel_size}
    return f"{model.keys[name]}: {', '.join((*words, *_above_one(sizes)))}"


def _above_one(sizes: dict[str, int]) -> list[str]:
    return [f"{name} {size}" for name, size in sizes.items() if size > 1]


def _rows(args: Namespace, datasets: DatasetProvider) -> str:
    paths = parse_blend(training_files(args), flag=TRAINING).paths
    each = args.micro_batch_size * data_parallel_size(args)
    sizes = step_sizes(args) or StepSizes.constant(each)
    least = sizes.sizes[0][1]
    batch = f"{least} to {sizes.largest}" if sizes.vary else str(least)
    files = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    told = f"{len(datasets.train):,} of {files}; {batch} a step; "
    steps = f"the run has {args.train_iters} steps"
    if datasets.samples is None:
        return f"{told}packed as they come; {steps}"
    epoch = max(1, sizes.steps(datasets.samples, each=each))
    packed = "planned packs, about " if args.packing else ""
    return f"{told}{packed}{epoch} steps an epoch; {steps}, {args.train_iters / epoch:.3g} epochs"


def _start(args: Namespace) -> str:
    if has_checkpoint(args):
        step = args.ckpt_step or tracked_iteration(args.load)
        if step == "release":
            return f"weights of {args.load}"
        how = "weights of" if args.finetune else "resumed from"
        return f"{how} iteration {step} of {args.load}"
    adapters = f", adapters of {args.load_lora}" if args.load_lora else ""
    return f"weights of {args.load_hf}{adapters}" if args.load_hf else "random weights"


def _when(interval: int | None, args: Namespace) -> str:
    return f"every {interval} steps" if interval and interval < args.train_iters else "at the end"


def _exports(args: Namespace) -> list[Fact]:
    exports = (("the model for transformers", args.save_hf), ("the adapters", args.save_lora))
    return [(what, folder) for what, folder in exports if folder]


def _evaluation(args: Namespace, folder: str) -> str:
    data = "DATA.jsonl"
    if args.valid_data_path:
        data = str(parse_blend(args.valid_data_path, flag="--valid-data-path").paths[0])
    words = ["loongplug", "eval", "--model", folder, "--data", data]
    words += ["--tokenizer-model", args.tokenizer_model] if folder == args.save else []
    words += ["--media-root", args.media_root] if args.media_root else []
    for package in args.trusted_packages:
        words += ["--trusted-packages", package]
    return shlex.join(words)
