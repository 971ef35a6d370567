"""Step 0: what the machine is, and the most that it can do."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_steps.bench import PRODUCT, Bench
from gpu_steps.data import data_of
from gpu_steps.rows import Rows
from gpu_steps.sizes import ModelRun
from gpu_steps.timing import GIB, measure

_TESTS = Path(__file__).resolve().parents[2] / "tests"
_MARK = "pytest.mark.gpu"


def run(bench: Bench) -> None:
    """The doctor, a matrix product, a copy, and the tests that need a GPU."""
    sizes = bench.sizes
    # Later steps find their data made; they would make what is missing.
    making = bench.start(make_data, runs=sizes.all_runs(), folder=bench.folder)
    bench.attempt("doctor", doctor, device=bench.device, rows=bench.rows)
    making.result()  # before anything is timed
    bench.attempt(
        PRODUCT,
        ceilings,
        device=bench.device,
        rows=bench.rows,
        size=sizes.product,
        copy_bytes=sizes.copy_bytes,
        rounds=sizes.rounds,
    )
    _gpu_tests(bench.rows)


def doctor(*, device: str, rows: Rows) -> None:
    """What ``loongplug doctor`` finds."""
    from loongplug.platform.doctor import diagnose
    from loongplug.platform.machine import collect

    found = diagnose(collect(), device=device)
    for gpu in found.facts.gpus:
        rows.add("GPU", name=gpu.name, GiB=gpu.memory_bytes / GIB)
    facts = found.facts
    rows.add("layers", what=found.use["layers"])
    rows.add("attention", what=found.use["attention"])
    for package in ("torch", "megatron-core", "transformers"):
        rows.add(package, what=facts.packages[package] or "not installed")
    rows.add("CUDA that torch was built for", what=facts.torch_cuda or "none")
    for problem in found.problems:
        rows.add(problem.severity, what=problem.text)


def make_data(*, runs: Sequence[ModelRun], folder: Path) -> None:
    """The images and rows of all ``runs``."""
    for run in runs:
        data_of(run, folder=folder)


def ceilings(*, device: str, rows: Rows, size: int, copy_bytes: int, rounds: int) -> None:
    """A bf16 product of two square matrices, and a copy within the device's memory."""
    import torch

    left, right = (
        torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2)
    )  # [size, size]
    product = measure(lambda: left @ right, device=device, rounds=rounds)
    rate = 2 * size**3 / product.ms / 1e9
    rows.put_figures(PRODUCT, {"size": f"{size:,}^3 bf16", "ms": product.ms, "TFLOP/s": rate})
    source = torch.zeros(copy_bytes, device=device, dtype=torch.uint8)  # [copy_bytes]
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device=device, rounds=rounds)
    moved = 2 * copy_bytes / copy.ms / 1e6  # each byte is read and written
    rows.put_figures("copy", {"size": f"{copy_bytes / 1e9:g} GB", "ms": copy.ms, "GB/s": moved})


def _gpu_tests(rows: Rows) -> None:
    """The tests that are marked ``gpu``, by files, since collecting all takes long."""
    files = sorted(str(path) for path in _TESTS.rglob("test_*.py") if _MARK in path.read_text())
    if not files:
        rows.missing("tests marked gpu", f"{_TESTS} has none: run the driver from a checkout")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    ended = subprocess.run(
        command, cwd=_TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(ended.stdout)
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    said = lines[-1].strip("= ") if lines else "nothing was said"
    if ended.returncode:
        rows.missing("tests marked gpu", f"pytest ended with exit code {ended.returncode}: {said}")
    else:
        rows.add("tests marked gpu", outcome=said)
