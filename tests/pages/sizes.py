"""Every published model built on the meta device: its sizes, as the docs' table.

``PYTHONPATH=tests python -m pages.sizes`` prints it.
"""

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from loongplug.models.entries import only_decoder
from loongplug.models.hf_mapping import Mapping
from loongplug.training.arguments import complete, validate_with_megatron
from loongplug.training.config import ComposedModel, available_models, compose_model
from loongplug.training.defaults import MEGATRON_TOKENIZER, apply_defaults
from loongplug.training.flags import read_command_line

# No run takes place; these only satisfy Megatron's checks.
_FLAGS = ("--micro-batch-size", "1", "--seq-length", "1", "--train-iters", "1", "--lr", "1")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of one model; all counts are of parameters, tied ones counted once.

    ``active`` leaves out the experts that a token is not sent to; ``modules`` counts by the
    module's name, and ``columns`` has the names of the encoders, the projectors and the decoder.
    """

    name: str
    family: str
    parameters: int
    active: int
    modules: dict[str, int]
    columns: tuple[tuple[str, ...], ...]
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    experts: int | None
    top_k: int | None
    tied: bool


def with_placeholder_ids(composed: ComposedModel) -> Any:
    """The composed config, with numbers for the token ids that it leaves to the tokenizer."""
    config = composed.config
    missing = [field for field in composed.family.special_tokens if getattr(config, field) is None]
    return dataclasses.replace(config, **{field: index for index, field in enumerate(missing)})


def model_size(name: str, composed: ComposedModel) -> ModelSize:
    """Build the whole model on the meta device and count.

    No collectives, but Megatron's parallel state of one rank has to be there.
    """
    from loongplug.training.provider import build_on_meta  # not before the platform is active

    config = with_placeholder_ids(composed)
    args = _arguments(composed)
    whole = build_on_meta(config, composed.family, args)
    mapping = composed.family.load_hugging_face(config).mapping
    modules = {
        module: _count(getattr(whole, module)) - _absent(mapping, module)
        for module in config.modules()
    }
    parameters = sum(modules.values())
    experts, top_k = args.num_experts, args.moe_router_topk if args.num_experts else None
    idle = 0
    if experts:
        in_experts = sum(
            prod(source.shape)
            for bundle in mapping.bundles()
            if bundle.row.experts is not None
            for source in bundle.sources
        )
        idle = in_experts // experts * (experts - top_k)
    return ModelSize(
        name=name,
        family=composed.family.name,
        parameters=parameters,
        active=parameters - idle,
        modules=modules,
        columns=(
            tuple(config.encoders),
            tuple(each.projector for each in config.encoders.values()),
            (only_decoder(config.entries()).name,),
        ),
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        key_value_heads=args.num_query_groups,
        experts=experts,
        top_k=top_k,
        tied=not args.untie_embeddings_and_output_weights,
    )


def markdown_table(sizes: Iterable[ModelSize]) -> str:
    """The sizes as a Markdown table for the docs, by family and size."""
    ordered = sorted(sizes, key=lambda size: (size.family, size.parameters))
    header = (
        *("model (`--model-name`)", "parameters", "active per token"),
        *("encoder", "projector", "decoder"),
        *("layers", "hidden", "heads / kv", "experts / top-k", "tied", "bf16 checkpoint"),
    )
    lines = [_line(header), _line(["---", *["---:"] * 5, *["---"] * 6])]
    return "\n".join([*lines, *(_line(_cells(size)) for size in ordered)])


def _cells(size: ModelSize) -> list[str]:
    return [
        f"`{size.name}`",
        f"{size.parameters:,}",
        _short(size.active, billion="B"),
        *(
            " + ".join(_short(size.modules[module], billion="B") for module in column)
            for column in size.columns
        ),
        str(size.layers),
        str(size.hidden),
        f"{size.heads} / {size.key_value_heads}",
        f"{size.experts} / {size.top_k}" if size.experts else "",
        "yes" if size.tied else "no",
        f"{_short(2 * size.parameters, billion='G')}B",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(number: int, *, billion: str) -> str:
    """Three digits and a unit: 8.77 B, 576 M."""
    unit, letter = (10**9, billion) if number >= 10**9 else (10**6, "M")
    value = number / unit
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {letter}"


def _absent(mapping: Mapping, module: str) -> int:
    """What a module has beside the model's parameters: zeros that no file has."""
    return sum(
        prod(source.shape)
        for entry in mapping.entries()
        if entry.name.startswith(f"{module}.")
        for source in entry.row.sources
        if source.absent
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _arguments(composed: ComposedModel) -> Namespace:
    """Megatron's arguments for one rank of the model."""
    args = read_command_line(_FLAGS).args
    complete(args, device="cpu")
    for name, argument in composed.family.megatron_arguments(composed.config).items():
        setattr(args, name, argument.value)
    apply_defaults(args, given=(), backend="gloo")
    args.tokenizer_type = MEGATRON_TOKENIZER
    validate_with_megatron(args)
    return args


@contextmanager
def one_rank() -> Iterator[None]:
    """The CPU platform, and Megatron's parallel state of a single rank."""
    from loongplug.platform import activate

    platform = activate("cpu")
    from loongplug.platform.upstream import apply_upstream_replacements

    apply_upstream_replacements(platform)
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it would warn within the table
    with one_rank():
        print(
            markdown_table(
                model_size(name, compose_model(model_name=name)) for name in available_models()
            )
        )
