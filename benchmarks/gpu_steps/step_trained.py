"""Step 6: a model all of which is trained, in its modes, and units encoded singly and joined."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_steps.bench import Bench
from gpu_steps.data import data_of
from gpu_steps.measured import FlopsPerToken, add_figures, trained
from gpu_steps.models import config_of
from gpu_steps.rows import Rows
from gpu_steps.step_dense import add_profile

_UNITS = 8
SEPARATE = ("--enable-full-hetero-dp",)
OFFLOAD = (
    "--full-hetero-dp-cpu-offload",
    "--offload-encoder-activations",
    "--offload-encoder-state",
)


def run(bench: Bench) -> None:
    """Uniform, full separation, the same with offloads. Phases are those of the traced run."""
    run = bench.sizes.trained
    data = data_of(run, folder=bench.folder)
    flops = FlopsPerToken(bench, run, data)
    units = partial(
        encode_units,
        device=bench.device,
        rows=bench.rows,
        sides=[run.sides[number % len(run.sides)] for number in range(_UNITS)],
        vision=config_of(run).image_encoder,
        rounds=bench.sizes.rounds,
    )
    traces = bench.folder / "trace"
    for case, flags, options in (
        ("uniform", (), {"after": units}),
        ("full separation, --trace", (*SEPARATE, "--trace", str(traces)), {}),
        ("full separation, offloads", (*SEPARATE, *OFFLOAD), {"extras": ("profile",)}),
    ):
        figures = trained(bench, case, run, data, seq_length=run.row_length, flags=flags, **options)
        if figures is None:
            continue
        add_figures(bench, case, figures, flops=flops)
        if "--trace" in flags:
            bench.attempt("phases", add_phases, rows=bench.rows, folder=traces)
        if figures.profile is not None:
            add_profile(bench.rows, case, figures.profile)


def encode_units(
    model: Any, *, device: str, rows: Rows, sides: Sequence[int], vision: Any, rounds: int
) -> None:
    """Forward and backward of units of square images with these sides, one by one and as one."""
    import torch

    from gpu_steps.timing import attempt
    from loongplug.data.microbatch import MediaInput

    grids = [
        torch.tensor([[1, side // vision.patch_size, side // vision.patch_size]]) for side in sides
    ]
    units = [
        MediaInput(
            loaded=torch.randn(int(grid.prod()), vision.row_values, device=device),
            grids=grid,
        )
        for grid in grids
    ]
    whole = MediaInput(loaded=torch.cat([unit.loaded for unit in units]), grids=torch.cat(grids))

    def encoder_of(several: Sequence[MediaInput]) -> Callable[[], None]:
        def encode() -> None:
            (entry,) = model.encoders
            for unit in several:
                model.encode(entry, unit).packed().sum().backward()

        return encode

    for case, several in (("one by one", units), ("joined", [whole])):
        attempt(
            rows,
            f"{len(units)} units of {len(whole.rows):,} patches, {case}",
            partial(encoder_of, several),
            operations=0,
            device=device,
            rounds=rounds,
        )


def add_phases(*, rows: Rows, folder: Path) -> None:
    """What the last whole step's time went to, by the run's own trace."""
    from loongplug.observe.shares import shares
    from loongplug.observe.trace_file import read_folder

    (trace,) = read_folder(folder)
    last = max(trace.whole_steps())
    events = [event for event in trace.events if event.step == last]
    (step,) = (event for event in events if event.phase == "step")
    found = shares((step.start, step.end), events)
    for state, nanoseconds in found.by_state.items():
        if nanoseconds:
            rows.put_figures(
                state,
                {
                    "traced ms": nanoseconds / 1e6,
                    "share of the step": nanoseconds / (step.end - step.start),
                },
            )
