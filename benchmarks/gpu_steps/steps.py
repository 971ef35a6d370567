"""The steps by their numbers, each with its limit."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_steps.bench import Bench


@dataclass(frozen=True, kw_only=True)
class Step:
    """``module:function`` is imported by the step's process, so that the driver stays light."""

    number: int
    title: str
    limit_seconds: float
    function: str


# Eight minutes in all.
STEPS = (
    Step(number=0, title="ceilings", limit_seconds=40, function="step_ceilings:run"),
    Step(number=1, title="tiny runs in bf16", limit_seconds=75, function="step_tiny_runs:run"),
    Step(number=2, title="kernels", limit_seconds=40, function="step_kernels:run"),
    Step(
        number=3,
        title="a dense model, frozen encoder",
        limit_seconds=105,
        function="step_dense:run_alone",
    ),
    Step(
        number=4,
        title="beside transformers",
        limit_seconds=65,
        function="step_dense:run_beside_transformers",
    ),
    Step(
        number=5,
        title="busy share, kernels, waits of the host",
        limit_seconds=40,
        function="step_dense:run_profiled",
    ),
    Step(number=6, title="a model all trained", limit_seconds=65, function="step_trained:run"),
    Step(number=7, title="experts", limit_seconds=50, function="step_experts:run"),
)


def chosen_steps(text: str | None) -> Sequence[Step]:
    """Those of ``--steps``, in the steps' own order; all without it. Raises ValueError."""
    if text is None:
        return STEPS
    numbers = text.split(",")
    known = {str(step.number) for step in STEPS}
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise ValueError(
            f"--steps is {text!r}: expected numbers from 0 to {len(STEPS) - 1} with commas between"
            " them, such as 0,2,5."
        )
    return [step for step in STEPS if str(step.number) in numbers]


def enter(number: int, bench: Bench) -> None:
    """The step itself, in its process."""
    module, _, function = STEPS[number].function.partition(":")
    getattr(importlib.import_module(f"gpu_steps.{module}"), function)(bench)
