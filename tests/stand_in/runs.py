"""Training on the stand-in, recorded as on the CPU."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from parity.built_in import Fault
from parity.cells import Cell
from ranks import run_ranks

from loongplug.verify.forked_runs import record
from loongplug.verify.ranks import OnEvent, join
from stand_in.waits import Wait, counted, not_needed

# What CPU runs leave out: kernels that exist for CUDA only, and fusions, which round otherwise.
AS_ON_THE_CPU = (
    *("--use-cpu-initialization", "--no-masked-softmax-fusion", "--no-bias-dropout-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--disable-jit-fuser"),
    "--no-persist-layer-norm",
)
SECONDS = 300.0

# The MoE overlap with tensors away.
OVERLAP = Cell(
    model="qwen3_vl_moe_tiny",
    mode="full-hetero-dp",
    tp=2,
    ep=2,
    sequence_parallel=True,
    optimizer="overlapped",
    balance=True,
    overlap=True,
    kept="tensors away",
    shared_experts=True,
)


def on_stand_in(flags: Sequence[str]) -> list[str]:
    """``flags`` of a CPU run, on the stand-in."""
    at = list(flags).index("--device")
    return [*flags[:at], "--device", "cuda", *flags[at + 2 :], *AS_ON_THE_CPU]


def recorded(flags: Sequence[str], *, ranks: int, folder: Path, fault: Fault | None = None) -> Path:
    """``flags`` of a CPU run, recorded on stand-in devices; gives the recording's folder.

    ``fault`` is built in on every rank before it starts. A rank that waits for its device in a
    microbatch, or between them for images, raises AssertionError.
    """

    def rank(number: int, tell: OnEvent, **options: Any) -> None:
        from loongplug.verify.step_recorder import record_run

        extension = _enter(number, fault).extension
        found = not_needed(counted(lambda: record_run(number, tell, **options), extension))
        assert not found, found

    return record(
        on_stand_in(flags),
        ranks=ranks,
        device="cuda",
        folder=folder,
        timeout=SECONDS,
        record_rank=rank,
    )


def train(
    function: Callable[..., Any], flags: Sequence[str], *, ranks: int, **options: Any
) -> list[Any]:
    """What :func:`trained` or :func:`trained_on_the_cpu` gives, on every rank."""
    with TemporaryDirectory() as folder:
        options |= {"flags": flags, "folder": Path(folder)}
        return run_ranks(function, ranks, timeout=SECONDS, **options)


def trained(
    number: int, *, flags: Sequence[str], folder: Path, fault: Fault | None = None
) -> dict[Wait, int]:
    """Train as ``flags`` of a CPU run say, on the stand-in; gives what made the host wait."""
    extension = _enter(number, fault).extension
    return counted(lambda: _train(number, on_stand_in(flags), folder, "cuda"), extension)


def trained_as_launched(
    number: int,
    *,
    flags: Sequence[str],
    folder: Path,
    port: int,
    fault: Fault | None = None,
) -> list[Wait]:
    """Train as torchrun has a rank start, with a GPU's own defaults; gives waits without need.

    Every rank's current device is the first one until Megatron makes the process group, weights
    are made on the device, and kernels are fused.
    """
    from loongplug.training.run import run

    extension = _enter(number, fault).extension
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    given = on_stand_in(flags)[: -len(AS_ON_THE_CPU)]
    return not_needed(counted(lambda: run(given), extension))


def trained_on_the_cpu(number: int, *, flags: Sequence[str], folder: Path) -> None:
    """The same without the stand-in."""
    _train(number, flags, folder, "cpu")


def _train(number: int, flags: Sequence[str], folder: Path, device: str) -> None:
    from loongplug.training.run import run

    dist.destroy_process_group()  # the harness's, which is gloo's
    join(number, folder=folder, device=device, minutes=SECONDS / 60)
    run(flags, verified=True)


def _enter(number: int, fault: Fault | None) -> Any:
    from stand_in.device import enter

    platform = enter()
    if fault is not None:
        fault(number)
    return platform
