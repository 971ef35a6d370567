"""Steps 3 to 5: a dense model with a frozen encoder, beside transformers, and under a profiler."""

from gpu_steps.bench import Bench
from gpu_steps.data import data_of
from gpu_steps.kernel_trace import KernelTrace
from gpu_steps.measured import PACKED, FlopsPerToken, add_figures, plain, trained
from gpu_steps.rows import Rows

_NO_DEVICE = "nothing ran on a device"


def run_alone(bench: Bench) -> None:
    """Step 3: rows packed, padded, and packed without Megatron's compiled fusions."""
    run = bench.sizes.frozen
    data = data_of(run, folder=bench.folder)
    flops = FlopsPerToken(bench, run, data)
    for case, flags in (
        ("packed", PACKED),
        ("padded", ()),
        ("packed, --disable-jit-fuser", (*PACKED, "--disable-jit-fuser")),
    ):
        figures = trained(bench, case, run, data, seq_length=run.seq_length, flags=flags)
        if figures is not None:
            add_figures(bench, case, figures, flops=flops)


def run_beside_transformers(bench: Bench) -> None:
    """Step 4: the same samples in one microbatch of whole rows, by LoongPlug and by transformers.

    The fair ratio is that of forward and backward: precisions of the update differ.
    """
    run = bench.sizes.frozen
    data = data_of(run, folder=bench.folder)
    flops = FlopsPerToken(bench, run, data)
    passes = {}
    ours = trained(bench, "LoongPlug", run, data, seq_length=run.row_length, micro_batch=run.batch)
    if ours is not None:
        add_figures(bench, "LoongPlug", ours, flops=flops)
    for case, updates in (
        ("transformers, bf16, no update", False),
        ("transformers, fp32 + autocast, fused AdamW", True),
    ):
        theirs = plain(bench, case, run, data, updates=updates)
        if theirs is None:
            continue
        add_figures(bench, case, theirs, flops=flops)
        if ours is not None:
            passes[case] = sum(theirs.forward_backward_ms) / sum(ours.forward_backward_ms)
    for case, ratio in passes.items():
        bench.rows.add("LoongPlug's speed, forward and backward", against=case, times=ratio)


def run_profiled(bench: Bench) -> None:
    """Step 5: one packed step under the profiler, and one in which each wait of the host warns."""
    run = bench.sizes.frozen
    figures = trained(
        bench,
        "packed",
        run,
        data_of(run, folder=bench.folder),
        seq_length=run.seq_length,
        flags=PACKED,
        extras=("profile", "waits"),
    )
    if figures is None:
        return
    assert figures.profile is not None
    assert figures.waits is not None
    add_profile(bench.rows, "packed", figures.profile)
    before = sum(wait.before_update for wait in figures.waits)
    bench.rows.add(
        "waits that warn",
        times_in_the_step=sum(wait.times for wait in figures.waits),
        before_the_update=before,
        per_microbatch=before / run.batch,
    )
    for wait in figures.waits:
        bench.rows.add(
            "waits at",
            line=wait.where,
            times_in_the_step=wait.times,
            before_the_update=wait.before_update,
        )
    for kernel in figures.profile.top:
        bench.rows.add(
            "kernel", name=kernel.name, step_ms=kernel.ms, launches_in_the_step=kernel.launches
        )


def add_profile(rows: Rows, case: str, profile: KernelTrace) -> None:
    """A row of the whole profile; where there is no device, the reason why there is none."""
    if profile.busy is None:
        rows.missing(f"profile: {case}", _NO_DEVICE)
        return
    rows.put_figures(
        f"profile: {case}",
        {
            "profiled step ms": profile.ms,
            "busy": profile.busy,
            "launches": profile.launches,
            "syncs in the step": profile.waits,
            "sync ms": profile.wait_ms,
            "pageable copies in the step": profile.pageable_copies,
            "copy ms": profile.copy_ms,
            "copies beside kernels": profile.copy_beside_compute,
        },
    )
