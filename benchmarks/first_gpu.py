"""What the first run on a GPU shows: one driver, eight minutes, no network, no TransformerEngine.

    python benchmarks/first_gpu.py --out DIR              all steps on one GPU
    python benchmarks/first_gpu.py --out DIR --steps 0,3  some of them
    python benchmarks/first_gpu.py --out DIR --tiny       all of them in tiny sizes, on the CPU

After each step ``DIR/first_gpu.json`` and ``DIR/first_gpu.md`` are written again; steps of an
earlier run that are not run again stay in them. Logs are in
``DIR/logs``, data and traces in ``DIR/files``.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_steps.bench import PRODUCT, Bench
from gpu_steps.processes import last_lines, run_in_group, step_context
from gpu_steps.report import NAME, Report, StepRecord
from gpu_steps.rows import Rows
from gpu_steps.sizes import FULL, TINY
from gpu_steps.steps import Step, chosen_steps, enter

_TINY_LIMIT_SECONDS = 300.0  # for all steps: no clock is watched, and the machine may be busy


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps that ``argv`` asks for (default: the command line); 0 when all were done."""
    parser = argparse.ArgumentParser(description="The first run on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--steps", help="numbers with commas between them; else all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; with --tiny cpu")
    options = parser.parse_args(argv)
    device = options.device or ("cpu" if options.tiny else "cuda")
    try:
        steps = chosen_steps(options.steps)
        _require(device, tiny=options.tiny)
    except ValueError as error:
        print(f"first_gpu.py: {error}", file=sys.stderr)
        return 1
    report = Report(
        options.out,
        setting={
            "device": device,
            "sizes": "tiny" if options.tiny else "full",
            "Python": platform.python_version(),
        },
    )
    for step in steps:
        _run(step, report, device=device, tiny=options.tiny)
    print(f"{options.out / NAME}.md")
    run = {step.number for step in steps}
    return 0 if all(each.outcome == "done" for each in report.steps if each.number in run) else 1


def _run(step: Step, report: Report, *, device: str, tiny: bool) -> None:
    """One step in a process of its own, and both files with its record."""
    out = report.folder
    for folder in (out / "logs", out / "files", out / "rows"):
        folder.mkdir(parents=True, exist_ok=True)
    log, rows = out / "logs" / f"{step.number}.log", Rows(out / "rows" / f"{step.number}.jsonl")
    for old in (log, rows.path):
        old.unlink(missing_ok=True)
    bench = Bench(
        device=device,
        sizes=TINY if tiny else FULL,
        folder=(out / "files").resolve(),
        rows=Rows(rows.path.resolve()),
        ceiling=Rows(out / "rows" / "0.jsonl").figure(PRODUCT, "TFLOP/s"),
    )
    limit = _TINY_LIMIT_SECONDS if tiny else step.limit_seconds
    print(f"{step.number}. {step.title} (at most {limit:.0f} s)", flush=True)
    outcome, seconds = run_in_group(
        enter, step.number, bench, context=step_context(device), log=log, limit_seconds=limit
    )
    record = StepRecord(
        number=step.number,
        title=step.title,
        outcome=outcome,
        seconds=seconds,
        limit_seconds=limit,
        rows=rows.read(),
        said_last=() if outcome == "done" else last_lines(log),
    )
    report.add(record)
    missing = sum(row.reason is not None for row in record.rows)
    print(f"   {outcome} in {seconds:.0f} s; {missing} not measured", flush=True)


def _require(device: str, *, tiny: bool) -> None:
    """Raises ValueError where the device is not there, or the sizes are not for it."""
    if device == "cpu" and not tiny:
        raise ValueError("--device cpu is for tiny sizes only: add --tiny.")
    if device == "cuda":
        from loongplug.platform import choose_device

        try:
            choose_device(device)
        except ValueError:
            raise ValueError(
                "torch sees no usable CUDA GPU here: use --tiny, which runs on the CPU."
            ) from None


if __name__ == "__main__":
    sys.exit(main())
