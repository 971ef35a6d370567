"""Every published model built on the meta device: its sizes, as the docs' tables.

``PYTHONPATH=tests python -m pages.sizes docs/models.md`` writes them there; without a file they are
printed.
"""

import dataclasses
import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from ranks import model_parallel, run_ranks
from torch import nn

from loongplug.models.entries import only_decoder
from loongplug.models.hf_mapping import Mapping
from loongplug.training.arguments import complete, validate_with_megatron
from loongplug.training.config import ComposedModel, available_models, compose_model
from loongplug.training.defaults import MEGATRON_TOKENIZER, apply_defaults
from loongplug.training.flags import read_command_line
from pages.marked import write

MARK = "sizes"

# No run takes place; these only satisfy Megatron's checks.
_FLAGS = ("--micro-batch-size", "1", "--seq-length", "1", "--train-iters", "1", "--lr", "1")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of one model; all counts are of parameters, tied ones counted once.

    ``active`` leaves out the experts that a token is not sent to; ``modules`` counts by the
    module's name, and ``columns`` has the names of the encoders, the projectors and the decoder.
    ``decoder`` has what the second table says of the decoder.
    """

    name: str
    family: str
    parameters: int
    active: int
    modules: dict[str, int]
    columns: tuple[tuple[str, ...], ...]
    decoder: tuple[object, ...]


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
        decoder=(
            args.num_layers,
            args.hidden_size,
            f"{args.num_attention_heads} / {args.num_query_groups}",
            f"{experts} / {top_k}" if experts else "",
            "no" if args.untie_embeddings_and_output_weights else "yes",
        ),
    )


def markdown_tables(sizes: Iterable[ModelSize]) -> str:
    """Two tables, by family and size: of the parameters, and of the decoders."""
    ordered = sorted(sizes, key=lambda size: (size.family, size.parameters))
    counts = ("parameters", "active", "encoder", "projector", "decoder", "bf16 file")
    decoder = ("layers", "hidden", "heads / kv", "experts / top-k", "tied")
    return "\n".join(
        [
            *(_line("model", *counts), _line("---", *["---:"] * len(counts))),
            *(_line(f"`{size.name}`", *_counts(size)) for size in ordered),
            *("", _line("decoder of", *decoder), _line("---", *["---:"] * len(decoder))),
            *(_line(f"`{size.name}`", *size.decoder) for size in ordered),
        ]
    )


def _counts(size: ModelSize) -> Iterator[str]:
    yield from (f"{size.parameters:,}", _short(size.active, billion="B"))
    for module in size.columns:
        yield " + ".join(_short(size.modules[each], billion="B") for each in module)
    yield f"{_short(2 * size.parameters, billion='G')}B"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


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


def all_sizes(rank: int) -> list[ModelSize]:
    """The sizes of all models, on a rank."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it would warn within the table
    with model_parallel():
        return [model_size(name, compose_model(model_name=name)) for name in available_models()]


if __name__ == "__main__":
    write(sys.argv[1:], {MARK: markdown_tables(*run_ranks(all_sizes, 1))})
