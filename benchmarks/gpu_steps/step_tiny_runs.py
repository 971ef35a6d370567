"""Step 1: tiny runs in bf16, each on the device and on the CPU, from the same weights.

Losses are compared, not times, so all of them run at once.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_steps.bench import Bench
from gpu_steps.data import Data, data_of
from gpu_steps.processes import CaseError, Child
from gpu_steps.sizes import TINY_RUN
from gpu_steps.training_run import RunFigures, RunSettings, training_run

_OFFLOADS = (
    "--full-hetero-dp-cpu-offload",
    "--offload-encoder-activations",
    "--offload-encoder-state",
)
_LEAVE_LAYERS = ("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1")


@dataclass(frozen=True, kw_only=True)
class _Case:
    name: str
    flags: tuple[str, ...] = ()
    packed: bool = False
    goes_on: bool = False  # from the case that saves, which is at its end by then


_SAVES = "--load-hf, --save-hf, --async-save"
_CASES = (
    _Case(name=_SAVES),
    _Case(name="resume from it", goes_on=True),
    _Case(
        name="full separation, three offload flags", flags=("--enable-full-hetero-dp", *_OFFLOADS)
    ),
    _Case(
        name="--packing, --offload-tensors fc2_input",
        flags=(*_LEAVE_LAYERS, "--offload-tensors", "fc2_input"),
        packed=True,
    ),
)


def run(bench: Bench) -> None:
    """Weights by the CPU first; then the cases, and behind them the one that resumes."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        _compare_all(_Runs(bench, data_of(TINY_RUN, folder=bench.folder), folder=Path(name)))


def _compare_all(runs: "_Runs") -> None:
    try:
        runs.make_weights()
    except CaseError as error:
        runs.rows.missing("weights for all", str(error))
        return
    for cases in (
        [case for case in _CASES if not case.goes_on],
        [case for case in _CASES if case.goes_on],
    ):
        runs.compare(cases)


class _Runs:
    """Both sides of each case, in processes of their own."""

    def __init__(self, bench: Bench, data: Data, *, folder: Path) -> None:
        self._bench = bench
        self._data = data
        self._folder = folder
        self.rows = bench.rows

    def make_weights(self) -> None:
        """Random ones, in a Hugging Face folder; by the CPU."""
        flags = ("--lr", "0", "--min-lr", "0", "--save-hf", str(self._folder / "weights"))
        self._child("cpu", flags=flags, steps=1, packed=False).result()

    def compare(self, cases: Sequence[_Case]) -> None:
        """All ``cases`` at once, each on the device and on the CPU."""
        devices = ("cpu", self._bench.device)
        steps = self._bench.sizes.tiny_iterations
        children = [
            [
                self._child(
                    device,
                    flags=self._flags(case, side=f"{number}-{device}"),
                    steps=2 * steps if case.goes_on else steps,
                    packed=case.packed,
                )
                for number, device in enumerate(devices)
            ]
            for case in cases
        ]
        for case, sides in zip(cases, children, strict=True):
            self._add(case.name, *sides)

    def _add(self, case: str, on_cpu: Child[RunFigures], on_device: Child[RunFigures]) -> None:
        """The device's losses, and how far the CPU's are from them where it has some."""
        expected = self._losses(f"{case}: on the CPU", on_cpu)
        found = self._losses(case, on_device)
        if not found:
            return
        apart = [abs(one - other) for one, other in zip(expected, found, strict=False)]
        self.rows.add(
            case,
            first_loss=found[0],
            last_loss=found[-1],
            last_on_the_CPU=expected[-1] if expected else None,
            largest_difference=max(apart) if apart else None,
        )

    def _losses(self, case: str, child: Child[RunFigures]) -> Sequence[float]:
        """None, and a row that says why, where the run failed."""
        try:
            return child.result().losses
        except CaseError as error:
            self.rows.missing(case, str(error))
            return ()

    def _flags(self, case: _Case, *, side: str) -> tuple[str, ...]:
        checkpoints = str(self._folder / f"checkpoints-{side}")
        weights = ("--load-hf", str(self._folder / "weights"))
        if case.goes_on:
            # It has more iterations than the run that saved, and a constant rate.
            return *weights, "--load", checkpoints, "--override-opt-param-scheduler"
        if case.name == _SAVES:
            saves = ("--save", checkpoints, "--async-save")
            return *weights, *saves, "--save-hf", str(self._folder / f"exported-{side}")
        return *weights, *case.flags

    def _child(
        self, device: str, *, flags: Sequence[str], steps: int, packed: bool
    ) -> Child[RunFigures]:
        rows = TINY_RUN.seq_length if packed else TINY_RUN.row_length
        return self._bench.start(
            training_run,
            settings=RunSettings(
                flags=(
                    *self._bench.run_flags(TINY_RUN, self._data, seq_length=rows),
                    *("--device", device, "--num-workers", "0", "--micro-batch-size", "1"),
                    *(("--packing",) if packed else ()),
                    *flags,
                ),
                warmup=0,
                steps=steps,
                began=time.time(),
                folder=self._folder,
            ),
        )
