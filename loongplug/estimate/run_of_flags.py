"""From the flags of a run to its checked arguments, its microbatches, its optimizer."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from loongplug.estimate.microbatches import StepOf, step_of_data, step_of_size
from loongplug.estimate.model_state import Stepping
from loongplug.models.family import Family
from loongplug.platform import requested_device
from loongplug.training.arguments import ParsedArguments
from loongplug.training.config import compose_asked_for
from loongplug.training.defaults import default_tokenizer
from loongplug.training.flags import read_command_line, without_flags
from loongplug.training.special_tokens import FILE
from loongplug.verify.plan import first_rank

USABLE = 0.9  # of a device: its libraries, fragments and peaks of communication have the rest
GB = 10**9
# What the machine of the run has and this one may not; none of it changes what is counted.
_OF_THE_MACHINE = frozenset(
    ("device", "transformer_impl", "distributed_backend", "moe_permute_fusion")
)


def fits_in(nbytes: int, *, device_memory: float) -> bool:
    """Whether a rank's bytes fit in the usable part of a device of so many GB."""
    return nbytes <= USABLE * device_memory * GB


def run_of(
    flags: Sequence[str], *, ranks: int, visual_tokens: int | None, folder: Path
) -> tuple[ParsedArguments, StepOf]:
    """The checked arguments of a run, and the microbatches of its first step by replica.

    ``visual_tokens`` of each sample stand in for the images of the data; the flags need name
    neither data nor tokenizer then, for which there will be others in ``folder``.

    Raises:
        ValueError: the flags or ``visual_tokens`` cannot be used.
    """
    with quiet():
        stand_ins = None if visual_tokens is None else folder
        parsed = parsed_for(flags, ranks=ranks, stand_ins=stand_ins)
        args, model = parsed.args, parsed.model
        if visual_tokens is None:
            return parsed, step_of_data(args, model)
        return parsed, step_of_size(args, model, visual_tokens=visual_tokens)


def parsed_for(
    flags: Sequence[str], *, ranks: int, stand_ins: Path | None = None
) -> ParsedArguments:
    """The checked arguments of the first rank, for tensors that are on no device.

    The run is for GPUs, unless ``--device cpu`` is among the flags. In the folder ``stand_ins``
    there will be a tokenizer and an empty file of data for flags that name none.

    Raises:
        ValueError: the flags cannot be used, or name too little.
    """
    line = read_command_line(flags)  # refuses what is no flag before it is taken apart
    args = line.args
    default_tokenizer(args)
    sizes = {
        "tokenizer-model": args.tokenizer_model,
        "train-data-path": args.train_data_path or args.data_path,
    }
    for flag in (name for name, value in sizes.items() if not value):
        if stand_ins is None:
            raise ValueError(
                f"--{flag} is not given: expected a tokenizer and data, whose rows say how large "
                "microbatches are, or in their place --visual-tokens N, of each sample"
            )
        path = stand_ins
        if flag == "tokenizer-model":
            composed = compose_asked_for(args, overrides=line.overrides)
            _write_tokenizer(path, composed.config, family=composed.family)
        else:
            path = path / "rows.jsonl"
            path.touch()  # a run's start looks whether it is there, an estimate reads nothing of it
        flags = [*flags, f"--{flag}", str(path)]
    target = "cpu" if requested_device(flags) == "cpu" else "cuda"
    flags = [*without_flags(flags, _OF_THE_MACHINE), "--device", "cpu"]
    return first_rank(flags, ranks=ranks, target=target)


def _write_tokenizer(folder: Path, model: Any, *, family: Family) -> None:
    """Write a tokenizer that has the model's special tokens and no others."""
    known = {text: getattr(model, field) for field, text in family.special_tokens.items()}
    free = (number for number in count() if number not in known.values())
    ids = {text: next(free) if number is None else number for text, number in known.items()}
    tokens = [{"content": text, "id": number} for text, number in ids.items()]
    content = {"added_tokens": tokens, "model": {"vocab": {}}}
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")


def stepping_of(flags: Sequence[str]) -> Stepping:
    """How the optimizer of a run with these flags works: torch's, unless they ask for another."""
    line = read_command_line(flags)
    args = line.args
    engine = "transformer_impl" in line.flags and args.transformer_impl == "transformer_engine"
    if engine or args.optimizer == "adam":
        return "fused"
    return "one by one" if args.device == "cpu" else "all at once"


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Megatron says of models that it builds."""
    logger = logging.getLogger("megatron")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(before)
