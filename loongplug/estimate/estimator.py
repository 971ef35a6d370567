"""From the flags of a run to what the ranks of each of its stages hold."""

import logging
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loongplug.estimate.estimate import RankMemory
    from loongplug.estimate.microbatches import StepOf
    from loongplug.estimate.state import Stepping
    from loongplug.training.arguments import ParsedArguments

USABLE = 0.9  # of a device: its libraries, fragments and peaks of communication have the rest
GB = 10**9
# What the machine of the run has and this one may not; none of it changes what is counted.
_OF_THE_MACHINE = frozenset(
    ("device", "transformer_impl", "distributed_backend", "moe_permute_fusion")
)


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """A run's memory. ``rows`` are those that encoders take of each microbatch of a step."""

    parsed: "ParsedArguments"
    rows: tuple[int, ...]
    stages: "tuple[RankMemory, ...]"

    @property
    def fullest(self) -> "RankMemory":
        """The rank that needs most."""
        return max(self.stages, key=lambda each: each.total)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates runs of so many ``ranks``.

    ``visual_tokens`` of each sample stand in for the images of the data; the flags need name
    neither data nor tokenizer then, for which there will be others in ``folder``. ``says`` is told
    what is at work.
    """

    ranks: int
    visual_tokens: int | None
    folder: Path
    says: Callable[[str], None]

    def of(self, flags: Sequence[str], *, name: str) -> Estimated:
        """The run of these flags, ``name`` to who watches.

        Raises:
            ValueError: the flags or ``visual_tokens`` cannot be used.
        """
        self.says(f"{name}: flags and data")
        parsed, step_of = run_of(
            flags, ranks=self.ranks, visual_tokens=self.visual_tokens, folder=self.folder
        )
        with quiet():
            from loongplug.estimate.estimate import estimate
            from loongplug.estimate.microbatches import media_rows

            found = estimate(
                parsed,
                step_of,
                stepping=stepping_of(flags),
                on_stage=lambda stage, stages: self.says(f"{name}: stage {stage} of {stages}"),
            )
        return Estimated(
            parsed=parsed, rows=tuple(map(media_rows, step_of(0))), stages=tuple(found)
        )


def fits_in(nbytes: int, *, device_memory: float) -> bool:
    """Whether a rank's bytes fit in the usable part of a device of so many GB."""
    return nbytes <= USABLE * device_memory * GB


def run_of(
    flags: Sequence[str], *, ranks: int, visual_tokens: int | None, folder: Path
) -> "tuple[ParsedArguments, StepOf]":
    """The checked arguments of a run, and the microbatches of its first step by replica.

    ``visual_tokens`` and ``folder`` are as :class:`Estimator` has them.

    Raises:
        ValueError: the flags or ``visual_tokens`` cannot be used.
    """
    with quiet():
        stand_ins = None if visual_tokens is None else folder
        parsed = parsed_for(flags, ranks=ranks, stand_ins=stand_ins)
        from loongplug.estimate.microbatches import step_of_data, step_of_size

        args, model = parsed.args, parsed.model
        if visual_tokens is None:
            return parsed, step_of_data(args, model)
        return parsed, step_of_size(args, model, visual_tokens=visual_tokens)


def parsed_for(
    flags: Sequence[str], *, ranks: int, stand_ins: Path | None = None
) -> "ParsedArguments":
    """The checked arguments of the first rank, for tensors that are on no device.

    The run is for GPUs, unless ``--device cpu`` is among the flags. In the folder ``stand_ins``
    there will be a tokenizer for flags that name none.
    """
    from loongplug.platform import activate, requested_device

    activate("cpu")
    from loongplug.training.flags import read_command_line, without_flags
    from loongplug.verify.plan import first_rank

    # Either refuses what is no flag before it is taken apart.
    if stand_ins is None:
        _require_sizes(read_command_line(flags).args)
    else:
        from loongplug.estimate.stand_in_data import with_stand_ins

        flags = with_stand_ins(flags, stand_ins)
    target = "cpu" if requested_device(flags) == "cpu" else "cuda"
    flags = [*without_flags(flags, _OF_THE_MACHINE), "--device", "cpu"]
    return first_rank(flags, ranks=ranks, target=target)


def _require_sizes(args: Namespace) -> None:
    from loongplug.training.defaults import default_tokenizer

    default_tokenizer(args)
    data = args.train_data_path or args.data_path
    for flag, value in (("tokenizer-model", args.tokenizer_model), ("train-data-path", data)):
        if not value:
            raise ValueError(
                f"--{flag} is not given: expected a tokenizer and data, whose rows say how large "
                "microbatches are, or in their place --visual-tokens N, of each sample"
            )


def stepping_of(flags: Sequence[str]) -> "Stepping":
    """How the optimizer of a run with these flags works: torch's, unless they ask for another.

    Needs the platform to be active.
    """
    from loongplug.training.flags import read_command_line

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
