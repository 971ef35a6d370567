"""``loongplug verify``: plan, run twice, compare, report."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loongplug.consoles import threadless_bars
from loongplug.output_files import write_figures
from loongplug.verify.forked_runs import RecordRank, device_of, plan_runs, preload, record
from loongplug.verify.plan import Request

AGREES, DIFFERS = 0, 1


def verify(
    request: Request,
    *,
    json_path: Path | None = None,
    keep: Path | None = None,
    record_layout: RecordRank | None = None,
) -> int:
    """Run the command; gives its exit code, :data:`AGREES` or :data:`DIFFERS`.

    ``keep`` is where recordings and logs stay. ``record_layout`` stands in for
    :func:`loongplug.verify.step_recorder.record_run` on the layout's ranks.

    Raises:
        ValueError: the flags or the options cannot be used.
        RankError: a run failed otherwise.
    """
    with _folder(keep) as folder, threadless_bars() as progress:
        task = progress.add_task("planning", total=1)
        progress.refresh()
        preload(device_of(request.flags, folder=folder))
        plan = plan_runs(request, folder=folder)
        progress.advance(task)

        def run(name: str, flags: tuple[str, ...], ranks: int, rank: RecordRank | None) -> Path:
            task = progress.add_task(f"{name}, {ranks} rank(s)", total=request.steps)
            progress.refresh()

            def on_step() -> None:
                progress.advance(task)
                progress.refresh()

            return record(
                flags,
                ranks=ranks,
                device=plan.device,
                folder=folder / name,
                on_step=on_step,
                record_rank=rank,
            )

        # The layout first: it is the one that may fail.
        found = run("layout", plan.layout, plan.ranks, record_layout)
        expected = run("reference", plan.reference, 1, None)
        progress.stop()
        from loongplug.verify.compare import compare
        from loongplug.verify.recorded_run import read_recording
        from loongplug.verify.report import as_json, report

        comparison = compare(read_recording(found), read_recording(expected))
        print(report(plan, comparison))
        write_figures(json_path, as_json(plan, comparison), "verify")
    if keep is not None:
        print(f"recordings and logs: {keep}")
    return AGREES if comparison.agrees else DIFFERS


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="loongplug-verify-") as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise ValueError(f"--keep {keep} is not empty; give a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep
