"""What a step is given: device, sizes, a folder for its files, and where its figures go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_steps.data import Data
from gpu_steps.models import IDS_OF_THE_TOKENIZER
from gpu_steps.processes import CaseError, Child
from gpu_steps.rows import Rows
from gpu_steps.sizes import ModelRun, Sizes

PRODUCT = "product"  # the case whose TFLOP/s are the ceiling


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One step's surroundings; travels to its process."""

    device: str
    sizes: Sizes
    folder: Path  # for data and traces; kept between steps
    rows: Rows
    ceiling: float | None  # TFLOP/s of step 0's product, where that was measured

    def start[Result](self, function: Callable[..., Result], **options: Any) -> Child[Result]:
        """``function(**options)`` in a process of its own, beside this one."""
        return Child(function, options, device=self.device)

    def attempt[Result](
        self, case: str, function: Callable[..., Result], **options: Any
    ) -> Result | None:
        """The same, waited for; None where it failed, and the row says why."""
        try:
            return self.start(function, **options).result()
        except CaseError as error:
            self.rows.missing(case, str(error))
            return None

    def run_flags(self, run: ModelRun, data: Data, *, seq_length: int) -> Sequence[str]:
        """Flags that all measured runs have; others follow."""
        workers = () if self.device == "cpu" else ("--num-workers", "4")
        return (
            *("--model-name", run.model, *run.overrides, *IDS_OF_THE_TOKENIZER),
            *("--device", self.device, "--training-phase", "sft", "--bf16", *workers),
            *data.flags(seq_length=seq_length),
            *("--global-batch-size", str(run.batch)),
            *("--lr", "1e-5", "--lr-decay-style", "constant", "--weight-decay", "0.0"),
            *("--clip-grad", "1.0", "--seed", "1234", "--log-interval", "1"),
        )

    def mfu(self, flops: float, *, seconds: float) -> float | None:
        """The share of step 0's product that ``flops`` in ``seconds`` are."""
        if self.ceiling is None:
            return None
        return flops / seconds / (self.ceiling * 1e12)
