"""Plans and recordings for the tests of ``loongplug verify``, made once each."""

import json
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from loongplug.verify.compare import Comparison, compare
from loongplug.verify.forked_runs import plan_runs, record
from loongplug.verify.plan import SAMPLES, Plan, Request
from loongplug.verify.recorded_run import read_recording
from loongplug.verify.report import report
from loongplug.verify.tiny_rows import write_rows

Mutation = Callable[[int], None]  # called in each rank before it trains, with its number

TINY = ("--device", "cpu", "--model-name", "qwen3_vl_tiny")
TIED = "model.foundation.tie_word_embeddings=true"
OMNI = "qwen2_5_omni_tiny"
SEES, HEARS = {"image_encoder", "image_projector"}, {"audio_encoder", "audio_projector"}
# Flags of layouts.
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
SP = (*TP2, "--sequence-parallel")
VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", "2")
FULL = ("--enable-full-hetero-dp",)
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTED = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1", "model.image_encoder.recompute=true"),
)


def made_plan(
    folder: Path, *flags: str, model: str = TINY[-1], steps: int = 2, **options: Any
) -> Plan:
    """A plan of a small model; its files lie in ``folder``."""
    flags = (*TINY[:-1], model, *flags)
    return plan_runs(Request(flags=flags, scale="tiny", steps=steps, **options), folder=folder)


def lies(
    offset: int, *, of: str = "image", pp: int = 1, tp: int = 1, dp: int = 1
) -> tuple[str, ...]:
    """An encoder's own ranks, which begin behind the decoder's or another encoder's."""
    encoder = f"model.{of}_encoder"
    return (
        f"{encoder}.rank_offset={offset}",
        f"{encoder}.pipeline_model_parallel_size={pp}",
        f"{encoder}.data_parallel_size={dp}",
        f"{encoder}.tensor_model_parallel_size={tp}",
    )


def write_changed_rows(
    folder: Path,
    change: Callable[[int, dict[str, Any]], None],
    *,
    media: Collection[str] = ("image",),
) -> None:
    """The rows of plans in ``folder``, each after ``change`` has had its number and itself."""
    rows = write_rows(folder / "data", samples=SAMPLES, media=media)
    samples = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    for number, sample in enumerate(samples):
        change(number, sample)
    rows.write_text("".join(json.dumps(each) + "\n" for each in samples), encoding="utf-8")


def keep_parts(sample: dict[str, Any], *kinds: str) -> None:
    """Leave a row the parts of these kinds alone."""
    for message in sample["messages"][::2]:
        message["content"] = [part for part in message["content"] if part["type"] in kinds]


class Pair:
    """A plan, and its single rank's recording, which serves any number of layout runs."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self._folder = folder
        self._reference = record(plan.reference, ranks=1, device="cpu", folder=folder / "reference")

    def compared(
        self, mutation: Mutation | None = None, *, more: tuple[str, ...] = ()
    ) -> Comparison:
        """The layout, mutated, against the single rank."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            found = record(
                (*self.plan.layout, *more),
                ranks=self.plan.ranks,
                device="cpu",
                folder=Path(folder),
                timeout=120.0,
                record_rank=None if mutation is None else partial(mutated, mutation=mutation),
            )
            return compare(read_recording(found), read_recording(self._reference))

    def agreeing(
        self, mutation: Mutation | None = None, *, more: tuple[str, ...] = ()
    ) -> Comparison:
        """The same, where no number differs."""
        comparison = self.compared(mutation, more=more)
        assert comparison.agrees, report(self.plan, comparison)
        return comparison


def mutated(rank: int, tell: Callable[[str], None], *, mutation: Mutation, **kwargs: Any) -> None:
    """A rank of a recorded run after ``mutation`` has changed what it runs."""
    from loongplug.verify.step_recorder import record_run

    mutation(rank)
    record_run(rank, tell, **kwargs)


def failing(comparison: Comparison, what: str) -> set[str]:
    """The modules in which some tensor fails by one measure."""
    return {each.module for each in comparison.tensors if each.what == what and each.fails}
