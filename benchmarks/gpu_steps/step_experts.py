"""Step 7: layers of experts, as they are and with transformers' grouped products."""

from gpu_steps.bench import Bench
from gpu_steps.data import data_of
from gpu_steps.measured import FlopsPerToken, add_figures, plain, trained
from gpu_steps.plain_run import PlainFigures
from gpu_steps.rows import Rows
from gpu_steps.training_run import RunFigures

_GROUPED = "grouped_mm"


def run(bench: Bench) -> None:
    """The same samples in one microbatch of whole rows."""
    run = bench.sizes.experts
    data = data_of(run, folder=bench.folder)
    flops = FlopsPerToken(bench, run, data)
    ours = trained(
        bench,
        "LoongPlug",
        run,
        data,
        seq_length=run.row_length,
        micro_batch=run.batch,
        extras=("profile",),
        times_layers=True,
    )
    if ours is not None:
        add_figures(bench, "LoongPlug", ours, flops=flops)
        _add_layers(bench.rows, "LoongPlug", ours)
    case = f"transformers, {_GROUPED}, bf16, no update"
    theirs = plain(
        bench,
        case,
        run,
        data,
        updates=False,
        experts_implementation=_GROUPED,
        times_layers=True,
        profiles=True,
    )
    if theirs is not None:
        add_figures(bench, case, theirs, flops=flops)
        _add_layers(bench.rows, case, theirs)


def _add_layers(rows: Rows, case: str, figures: RunFigures | PlainFigures) -> None:
    assert figures.layers is not None
    assert figures.profile is not None
    rows.put_figures(
        case,
        {
            "forward ms a layer": figures.layers.forward_ms,
            "backward ms a layer": figures.layers.backward_ms,
            "launches of the whole step": figures.profile.launches,
            "busy": figures.profile.busy,
        },
    )
