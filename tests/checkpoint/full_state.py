"""A run's weights and optimizer state as full tensors by name, in any layout.

The tensors are put together by the Hugging Face export, which shares nothing with Megatron's
sharded checkpoints: a wrong offset there cannot cancel out here.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from loongplug.models import qwen3_vl_moe
from loongplug.training import exports
from loongplug.training.run import run

WEIGHTS = "weights"
ADAPTERS = "-adapters"
KINDS = ("param", "exp_avg", "exp_avg_sq")

State = dict[str, torch.Tensor]


class Kept(NamedTuple):
    """What a rank's optimizers and reports say after a run.

    ``steps`` are Adam's; ``rates`` the highest, least and next learning rate of each group of
    parameters, by its module and the multiple of its weight decay.
    """

    steps: list[float]
    rates: dict[tuple[str, float], tuple[float, float, float]]
    losses: list[float]


def run_and_keep_state(rank: int, *, flags: list[str], folder: Path) -> Kept:
    """Run in this rank, and leave its final state in ``folder``."""
    from megatron.training import training

    made: dict[str, Any] = {}
    original_setup = training.setup_model_and_optimizer
    original_export = exports.save_hf_folder
    original_adapters = exports.save_adapters

    @functools.wraps(original_setup)  # what stands in for it looks at its signature
    def setup(*args: Any, **kwargs: Any) -> Any:
        made["model"], made["optimizer"], scheduler = original_setup(*args, **kwargs)
        return made["model"], made["optimizer"], scheduler

    def export(chunks: Sequence[nn.Module], target: Path, **kwargs: Any) -> None:
        del kwargs["weight_of"]  # adapters are written apart
        each(original_export, chunks, "", kwargs)

    def adapters(chunks: Sequence[nn.Module], target: Path, **kwargs: Any) -> None:
        each(original_adapters, chunks, ADAPTERS, kwargs)

    def each(write: Any, chunks: Sequence[nn.Module], suffix: str, kwargs: Any) -> None:
        write(chunks, folder / f"{WEIGHTS}{suffix}", **kwargs)
        kept = [(p, p.data) for chunk in chunks for p in chunk.parameters()]
        for kind in KINDS:
            _show(kind, chunks, made["optimizer"])
            write(chunks, folder / f"{kind}{suffix}", **kwargs)
        for parameter, data in kept:
            parameter.data = data

    qwen3_vl_moe._unread = lambda text: ()  # nobody but this test reads the folders
    training.setup_model_and_optimizer = setup
    exports.save_hf_folder = export
    exports.save_adapters = adapters
    lora = (
        ("--save-lora", str(folder / "unused_adapters"))
        if any(".lora." in each for each in flags)
        else ()
    )
    reports = run([*flags, "--save-hf", str(folder / "unused"), *lora])
    optimizers = _optimizers(made["optimizer"])
    steps = {
        float(state["step"])
        for optimizer in optimizers
        for parameter, state in optimizer.optimizer.state.items()
        if isinstance(parameter, torch.Tensor)  # else what a rank without any says
    }
    rates = {
        (group["module"], group["wd_mult"]): (group["max_lr"], group["min_lr"], group["lr"])
        for optimizer in optimizers
        for group in optimizer.optimizer.param_groups
    }
    return Kept(steps=sorted(steps), rates=rates, losses=[report.loss for report in reports])


def read_state(folder: Path) -> dict[str, State]:
    """What ``run_and_keep_state`` left: full tensors by kind and name."""
    return {kind: dict(_read(folder / kind)) for kind in (WEIGHTS, *KINDS)}


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = [*folder.glob("*.safetensors"), *Path(f"{folder}{ADAPTERS}").glob("*.safetensors")]
    for file in sorted(files):
        yield from load_file(file).items()


def _optimizers(optimizer: Any) -> list[Any]:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chain if not each.is_stub_optimizer]  # else frozen on all ranks


def _show(kind: str, chunks: Sequence[nn.Module], optimizer: Any) -> None:
    """Put this rank's shards of one kind of state in the parameters' places, in fp32.

    A parameter without an optimizer's state (frozen) shows zeros.
    """
    shown: dict[nn.Parameter, torch.Tensor] = {}
    for each in _optimizers(optimizer):
        shown |= _distributed(each, kind) if hasattr(each, "gbuf_ranges") else _plain(each, kind)
    for chunk in chunks:
        for parameter in chunk.parameters():
            state = shown.get(parameter)
            zeros = torch.zeros(parameter.shape, dtype=torch.float32)
            parameter.data = zeros if state is None else state.clone().view(parameter.shape)


def _distributed(optimizer: Any, kind: str) -> State:
    """Summed over the data parallel ranks: each element is one rank's, and zero elsewhere."""
    shown = {}
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            full = torch.zeros(parameter.numel(), dtype=torch.float32)
            if parameter in optimizer.model_param_group_index_map:
                range_ = optimizer._get_model_param_range_map(parameter)["param"]
                state = optimizer._get_main_param_and_optimizer_states(parameter)[kind]
                full[range_.start : range_.end] = state.detach()
            dist.all_reduce(full, group=buffer.data_parallel_group)
            shown[parameter] = full
    return shown


def _plain(optimizer: Any, kind: str) -> State:
    shown = {}
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            state = main if kind == "param" else optimizer.optimizer.state[main][kind]
            shown[main] = state.detach()
    for models, mains in zip(
        getattr(optimizer, "float16_groups", ()),
        getattr(optimizer, "fp32_from_float16_groups", ()),
        strict=True,
    ):
        for model, main in zip(models, mains, strict=True):
            shown[model] = shown.pop(main)
    return shown
