"""``loongplug verify``: plan, run twice, compare, report."""

import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.progress import Progress, TaskID

from loongplug.consoles import threadless_bars
from loongplug.output_files import write_figures
from loongplug.verify.forked_runs import RecordRank, device_of, plan_runs, preload, record
from loongplug.verify.plan import Request
from loongplug.verify.ranks import new_folder

AGREES, DIFFERS = 0, 1


def verify(
    request: Request,
    *,
    json_path: Path | None = None,
    keep: Path | None = None,
    record_layout: RecordRank | None = None,
) -> int:
    """The command; ``record_layout`` stands in for ``record_run`` on the layout's ranks."""
    kept = None if keep is None else nullcontext(new_folder(keep))
    with (
        kept or tempfile.TemporaryDirectory(prefix="loongplug-verify-") as name,
        threadless_bars() as progress,
    ):
        folder = Path(name)
        task = progress.add_task("planning", total=1)
        progress.refresh()
        preload(device_of(request.flags, folder=folder))
        plan = plan_runs(request, folder=folder)
        progress.advance(task)

        recordings = []
        for run, flags, ranks, record_rank in (
            ("layout", plan.layout, plan.ranks, record_layout),  # the one that may fail
            ("reference", plan.reference, 1, None),
        ):
            task = progress.add_task(f"{run}, {ranks} rank(s)", total=request.steps)
            progress.refresh()
            recordings.append(
                record(
                    flags,
                    ranks=ranks,
                    device=plan.device,
                    folder=folder / run,
                    on_step=partial(_advance, progress, task),
                    record_rank=record_rank,
                )
            )
        progress.stop()
        from loongplug.verify.compare import compare
        from loongplug.verify.recorded_run import read_recording
        from loongplug.verify.report import as_json, report

        comparison = compare(*map(read_recording, recordings))
        print(report(plan, comparison))
        write_figures(json_path, as_json(plan, comparison), "verify")
    if keep is not None:
        print(f"recordings and logs: {keep}")
    return AGREES if comparison.agrees else DIFFERS


def _advance(progress: Progress, task: TaskID) -> None:
    progress.advance(task)
    progress.refresh()
