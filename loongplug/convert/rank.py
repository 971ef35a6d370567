"""One rank of a conversion: build the model, fill it from one side, write the other."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from torch import nn

from loongplug.checkpoint.checkpoint_files import TRACKER, check_latest
from loongplug.checkpoint.hf_export import usual_dtype
from loongplug.checkpoint.hf_gather import OnBytes, WeightOf, ignore_bytes, loaded_weight
from loongplug.checkpoint.hf_import import load_hf_weights
from loongplug.checkpoint.lora_weights import load_adapters
from loongplug.checkpoint.parameter_holders import held_parameters
from loongplug.checkpoint.resume_checks import saved_tensors
from loongplug.checkpoint.safetensors_folder import FLOATS, open_tensors, present_name
from loongplug.checkpoint.settings_notes import CARRIED_FOLDER
from loongplug.convert.torch_dist_files import StreamingSaveStrategy, load_in_place
from loongplug.models.family import HuggingFaceModel
from loongplug.models.lora.mapping import AdapterTable, adapter_table
from loongplug.models.lora.peft_config import open_adapters
from loongplug.models.multimodal import MultimodalModel
from loongplug.parallel.failure import AtEnd, nothing_at_end
from loongplug.platform import current_platform
from loongplug.platform.upstream import apply_upstream_replacements
from loongplug.training.arguments import ParsedArguments, parse_arguments
from loongplug.training.checkpoints import check_source_folders, use_whole_checkpoints
from loongplug.training.exports import Exports
from loongplug.training.flags import read_command_line
from loongplug.training.log import megatron_output
from loongplug.training.outputs import outputs_ready
from loongplug.training.provider import ModelProvider, backend_of, engine_of
from loongplug.training.rules.folders import own_folder
from loongplug.training.start_agreement import require_same_start, require_same_weights

# What Megatron wants to know of any run, and its checkpoints without optimizer and random state.
_FLAGS = (
    *("--training-phase", "sft", "--seq-length", "1024", "--micro-batch-size", "1"),
    *("--train-iters", "1", "--lr", "1e-5"),
    *("--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"),
)


@dataclass(frozen=True)
class Converted:
    """What went through this rank."""

    shard_bytes: int  # of the parameters it held
    largest_tensor_bytes: int  # of the model's tensors on the Hugging Face side


def convert(flags: Sequence[str], *, at_end: AtEnd = nothing_at_end) -> Converted:
    """Convert as ``flags``, train.py's own, say. Every rank enters.

    ``--load-hf`` or ``--load`` names the source, ``--save``, ``--save-hf`` or ``--save-lora`` the
    target. A checkpoint is written as a *release*, from which training starts at iteration 0. Every
    tensor keeps its dtype. Where the model has adapters, ``--save-hf`` merges them into the
    weights; ``--load-lora`` brings them to those of a folder. ``at_end`` is as for a training run.
    """
    parsed, dtypes = _parse(flags)
    require_same_start(parsed)
    with outputs_ready(parsed.args, at_end=at_end):
        return _convert(parsed, dtypes)


def _convert(parsed: ParsedArguments, dtypes: dict[str, torch.dtype]) -> Converted:
    args = parsed.args
    model = parsed.family.load_hugging_face(parsed.model)
    exports = Exports(
        args=args,
        model=model,
        table=adapter_table(parsed.model, model),
        model_yaml=parsed.model_yaml,
        overrides=parsed.overrides,
    )
    check_source_folders(args, parsed.model_yaml)
    require_same_weights(args)
    exports.check()
    use_whole_checkpoints(current_platform(), asynchronous=False)
    with megatron_output(args, without_save="drop") as terminal:
        chunks = _build(parsed)
        with _byte_progress(terminal, shown=args.rank == 0) as progress_of:
            weight_of = _fill(chunks, exports, dtypes=dtypes, on_bytes=progress_of("reading"))
            if args.save:
                exports.save_release(chunks, strategy=StreamingSaveStrategy())
            exports.write(chunks, weight_of=weight_of, on_bytes=progress_of("writing"))
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    itemsize = max(parameter.dtype.itemsize for parameter in parameters)
    return Converted(
        shard_bytes=sum(parameter.nbytes for parameter in parameters),
        largest_tensor_bytes=itemsize * max(map(prod, model.mapping.sources().values())),
    )


def _fill(
    chunks: Sequence[MultimodalModel],
    exports: Exports,
    *,
    dtypes: dict[str, torch.dtype],
    on_bytes: OnBytes,
) -> WeightOf:
    """Fill the parameters from the source, in its ``dtypes``; what gives their values."""
    args, model, table = exports.args, exports.model, exports.table
    in_the_file = args.device == "cpu"
    if args.load:
        folder = _iteration_folder(args)
        _give_checkpoint_dtypes(chunks, dtypes, folder=folder)
        return load_in_place(chunks, folder, in_the_file=in_the_file)
    _give_folder_dtypes(chunks, model, dtypes)
    source = Path(args.load_hf)
    load_hf_weights(chunks, source, model=model, on_bytes=on_bytes, in_the_file=in_the_file)
    if table is not None and args.load_lora:
        _give_adapter_dtype(chunks, table, Path(args.load_lora))
        load_adapters(chunks, Path(args.load_lora), table=table)
    return loaded_weight


@contextmanager
def _byte_progress(terminal: TextIO, *, shown: bool) -> Iterator[Callable[[str], OnBytes]]:
    """What shows how far each long part is, by the part's name.

    A bar on a terminal; one line for each part elsewhere.
    """
    console = Console(file=terminal)
    progress = Progress(console=console, disable=not (shown and console.is_terminal))
    parts: dict[str, TaskID] = {}

    def on_bytes(part: str, done: int, total: int) -> None:
        if part not in parts:
            parts[part] = progress.add_task(part, total=total)
        progress.update(parts[part], completed=done)
        if done == total and not console.is_terminal:
            console.print(f"{part}: {total / 2**20:,.1f} MiB", highlight=False)

    with progress:
        yield lambda part: partial(on_bytes, part) if shown else ignore_bytes


def _parse(flags: Sequence[str]) -> tuple[ParsedArguments, dict[str, torch.dtype]]:
    """The arguments, completed by what the source tells, and the dtypes of its tensors."""
    apply_upstream_replacements(current_platform())  # among them, that nothing is unpickled
    given = read_command_line(flags).args
    _check_ends(given)
    if given.load_hf:
        processor_folder = Path(given.load_hf)
        with open_tensors(processor_folder) as tensors:
            found = tensors.types().items()
        dtypes = {name: FLOATS[kind] for name, kind in found if kind in FLOATS}
    else:
        processor_folder = Path(given.load) / CARRIED_FOLDER
        saved = saved_tensors(_iteration_folder(given))
        dtypes = {key: described.properties.dtype for key, described in saved.items()}
    completed = [*_FLAGS, *flags]
    if not given.tokenizer_model:
        completed += ["--tokenizer-model", str(processor_folder)]
    if usual_dtype(dtypes).itemsize == 2:
        completed.append("--bf16")
    return parse_arguments(completed, training=False), dtypes


def _check_ends(given: Namespace) -> None:
    """Refuse flags that do not name one source and a target."""
    if bool(given.load_hf) == bool(given.load):
        raise ValueError("give one source: --load-hf DIR (Hugging Face) or --load DIR (checkpoint)")
    if not given.save_hf and not given.save and not given.save_lora:
        raise ValueError(
            "give a target: --save DIR (checkpoint), --save-hf DIR (Hugging Face) or --save-lora "
            "DIR (adapters)"
        )
    if problem := own_folder(given, None):
        raise ValueError(f"{problem}: {own_folder.cure}")
    if given.load and given.load_lora:
        raise ValueError(
            "--load and --load-lora both have adapters; give --load-hf DIR with --load-lora DIR"
        )
    if given.load and given.save:
        raise ValueError(
            "--load and --save are both checkpoints, which load into any layout as they are; "
            "give --save-hf DIR"
        )


def _iteration_folder(given: Namespace) -> Path:
    """The checkpoint that is converted; no collectives."""
    load = Path(given.load)
    if not (load / TRACKER).is_file():
        raise ValueError(f"--load {load} has no checkpoint; give the folder that --save named")
    return check_latest(load, step=given.ckpt_step)


def _build(parsed: ParsedArguments) -> list[MultimodalModel]:
    """This rank's chunks of the model, whose weights have no meaning yet."""
    from megatron.core import parallel_state
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    args = parsed.args
    args.perform_initialization = False
    set_global_variables(args)
    initialize_megatron()
    provider = ModelProvider(
        parsed.model,
        parsed.family,
        engine=engine_of(args, parsed.model),
        backend=backend_of(args),
    )
    stages = args.virtual_pipeline_model_parallel_size
    for stage in range(stages) if stages else [None]:
        position = {"ignore_virtual": stage is None, "vp_stage": stage}
        provider(
            pre_process=parallel_state.is_pipeline_first_stage(**position),
            post_process=parallel_state.is_pipeline_last_stage(**position),
            vp_stage=stage,
        )
    return provider.chunks


def _give_folder_dtypes(
    model_chunks: Sequence[nn.Module], model: HuggingFaceModel, dtypes: dict[str, torch.dtype]
) -> None:
    """Empty parameters of the dtypes in a folder in the place of the chunks' own.

    ``dtypes`` are by the names that the folder's files have.
    """
    wanted: dict[int, torch.dtype] = {}
    problems: list[str] = []
    mapping, formerly = model.mapping, model.in_transformers.formerly
    dtypes = {present_name(name, formerly): dtype for name, dtype in dtypes.items()}
    for bundle in mapping.bundles():
        for source in bundle.sources:
            dtype = dtypes.get(source.name)
            if dtype is not None and wanted.setdefault(bundle.number, dtype) != dtype:
                problems.append(f"{source.name} is {dtype}, others {wanted[bundle.number]}")
    if problems:
        raise ValueError(
            "Tensors that belong together have different dtypes: "
            + "; ".join(problems[:5])
            + ". Save the model again in one dtype."
        )
    for own in held_parameters(model_chunks, mapping):
        _retype(own.parameter, wanted.get(own.entry.number))


def _give_adapter_dtype(
    model_chunks: Sequence[nn.Module], table: AdapterTable, folder: Path
) -> None:
    """Adapters of a folder's dtype in the place of the chunks' own, unless it mixes several."""
    file = open_adapters(folder)
    found = {FLOATS.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    if len(found) == 1 and (dtype := found.pop()) is not None:
        for own in held_parameters(model_chunks, table.mapping):
            own.parameter.data = own.parameter.data.to(dtype)


def _give_checkpoint_dtypes(
    model_chunks: Sequence[nn.Module], dtypes: dict[str, torch.dtype], *, folder: Path
) -> None:
    """Empty parameters of the dtypes in a checkpoint's folder in the place of the chunks' own."""
    from megatron.core.dist_checkpointing import load_content_metadata

    metadata = load_content_metadata(str(folder))  # says how tensors are named in it
    for chunk in model_chunks:
        parameters = dict(chunk.named_parameters())
        shards: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for name, sharded in shards.items():
            if name in parameters:
                _retype(parameters[name], dtypes.get(sharded.key))


def _retype(parameter: nn.Parameter, dtype: torch.dtype | None) -> None:
    if dtype is not None and parameter.dtype != dtype:
        parameter.data = torch.empty_like(parameter.data, dtype=dtype)
