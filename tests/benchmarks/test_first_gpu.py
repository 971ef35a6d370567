"""The driver for the first run on a GPU: whole on the CPU, steps that go wrong, its figures."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import first_gpu
import pytest
import torch
from eventually import eventually
from gpu_steps.bench import Bench
from gpu_steps.data import data_of
from gpu_steps.kernel_trace import trace_of
from gpu_steps.measured import _flops_per_token
from gpu_steps.models import amounts_of, hf_config_of
from gpu_steps.processes import last_lines, run_in_group
from gpu_steps.rows import Row, Rows
from gpu_steps.sizes import FULL, TINY, ModelRun
from gpu_steps.step_trained import OFFLOAD, SEPARATE
from gpu_steps.steps import STEPS, chosen_steps

from loongplug.verify.tiny_processor import write_processor

FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 0.5
WHOLE_RUN_SECONDS = 900.0  # of a machine with much other work


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_RUN_SECONDS)
def test_all_steps_in_tiny_sizes(tmp_path: Path) -> None:
    assert first_gpu.main(["--out", str(tmp_path), "--tiny"]) == 0
    steps = {
        step["number"]: step
        for step in json.loads((tmp_path / "first_gpu.json").read_text())["steps"]
    }
    assert list(steps) == [step.number for step in STEPS]
    missing = {
        (number, row["case"])
        for number, step in steps.items()
        for row in step["rows"]
        if row["reason"]
    }
    # What only a GPU has.
    assert {number for number, _ in missing} <= {2, 5, 6}
    assert all(
        any(word in case for word in ("cuDNN", "varlen", "grouped", "fused", "profile"))
        for _, case in missing
    ), missing
    figures = {
        (number, row["case"]): row["figures"]
        for number, step in steps.items()
        for row in step["rows"]
    }
    losses = [row["largest difference"] for (number, _), row in figures.items() if number == 1]
    assert losses == [0.0] * 4  # both sides are the CPU here
    assert all(0 < figures[3, case]["fill"] <= 1 for case in ("packed", "padded"))
    assert figures[3, "packed"]["fwd+bwd MFU"] > 0
    assert {"LoongPlug's speed, forward and backward", "LoongPlug"} <= {
        case for number, case in figures if number == 4
    }
    markdown = (tmp_path / "first_gpu.md").read_text()
    assert all(f"## {step.number}. {step.title}" in markdown for step in STEPS)


def _step(rows: Rows, kind: str, started: Path) -> None:
    rows.add("before", ms=1.5)
    print("this was said", flush=True)
    if kind == "fails":
        raise ValueError("on purpose")
    if kind == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        part = started.with_suffix(".part")
        part.write_text(str(child.pid))
        part.rename(started)
        time.sleep(600)


class _HasStarted(FORK.Process):
    """A process whose limit begins when it hangs, however long a busy machine takes until then."""

    hangs: Path

    def join(self, timeout: float | None = None) -> None:
        if timeout == LIMIT_SECONDS:
            eventually(self.hangs.exists)
        super().join(timeout)


@pytest.mark.quick
def test_a_step_that_hangs_is_ended_with_its_children_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_HasStarted, "hangs", tmp_path / "child", raising=False)
    patient = type("Patient", (type(FORK),), {"Process": _HasStarted})()
    outcomes = []
    for number, kind in enumerate(("hangs", "fails", "ends")):
        log = tmp_path / f"{kind}.log"
        rows = Rows(tmp_path / f"{kind}.jsonl")
        outcome, seconds = run_in_group(
            *(_step, rows, kind, tmp_path / "child"),
            context=patient if kind == "hangs" else FORK,
            log=log,
            limit_seconds=LIMIT_SECONDS if kind == "hangs" else 120.0,
        )
        outcomes.append(outcome)
        assert seconds < 600  # for which the one that hangs would sleep
        assert rows.read() == [Row(case="before", figures={"ms": 1.5})], number
        assert "this was said" in last_lines(log)
    assert outcomes == ["ended at its limit", "failed", "done"]
    assert "ValueError: on purpose" in last_lines(tmp_path / "fails.log")
    child = int((tmp_path / "child").read_text())
    eventually(lambda: _gone(child))


def _gone(process: int) -> bool:
    """Killed ones may stay as zombies until somebody reaps them."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.quick
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for flags, said in (
        ([], "torch sees no usable CUDA GPU here: use --tiny, which runs on the CPU.\n"),
        (["--device", "cpu"], "--device cpu is for tiny sizes only: add --tiny.\n"),
        (["--tiny", "--steps", "0,9"], "--steps is '0,9': expected numbers from 0 to 7"),
        (["--tiny", "--steps", ""], "--steps is '': expected numbers"),
    ):
        assert first_gpu.main(["--out", str(tmp_path), *flags]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert [step.number for step in chosen_steps("5,0")] == [0, 5]


@pytest.mark.parametrize("run", [FULL.frozen, FULL.trained, FULL.experts, TINY.experts])
def test_matrices_are_those_of_transformers(run: ModelRun, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    write_processor(tmp_path / "processor")
    eyes, decoder = amounts_of(run).entries.values()
    config = hf_config_of(run, processor=tmp_path / "processor")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    counted = dict.fromkeys(("decoder", "encoder", "projector"), 0)
    text = config.text_config
    for name, parameter in model.named_parameters(remove_duplicate=False):
        matrix = parameter.dim() >= 2 and "embed_tokens" not in name and "pos_embed" not in name
        if not matrix:
            continue
        part = "encoder" if "visual" in name else "decoder"
        count = parameter.numel()
        if "experts" in name:  # of which a token meets some
            count = count * text.num_experts_per_tok // text.num_experts
        counted["projector" if "merger" in name else part] += count
    projector = sum(each.forward["states"] for each in eyes.beside)
    of_states = (decoder.forward["states"], eyes.forward["states"], projector)
    assert of_states == tuple(2 * each for each in counted.values())


def _event(category: str, name: str, begin: float, duration: float) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}


@pytest.mark.quick
def test_a_profile_is_summed_up() -> None:
    events = [
        _event("cuda_runtime", "cudaLaunchKernel", 0, 1000),
        _event("kernel", "gemm", 1000, 2000),
        _event("kernel", "gemm", 2000, 2000),  # on another stream, beside the first
        _event("kernel", "add", 6000, 1000),
        _event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 3500, 1000),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 8000, 500),
        _event("cuda_runtime", "cudaStreamSynchronize", 9000, 1000),
        _event("cuda_runtime", "cudaDeviceSynchronize", 9500, 500),  # the driver's own
        _event("overhead", "Buffer Flush", 90000, 1000),
        {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 5},
    ]
    trace = trace_of(events)
    assert trace.ms == 10
    assert trace.busy == pytest.approx(0.5)  # 1 to 4.5, 6 to 7, 8 to 8.5 of 10 ms
    assert trace.launches == 3
    assert [(each.name, each.ms, each.launches) for each in trace.top] == [
        ("gemm", 4, 2),
        ("add", 1, 1),
    ]
    assert (trace.waits, trace.wait_ms, trace.pageable_copies) == (1, 1, 1)
    assert trace.copy_ms == 1.5
    assert trace.copy_beside_compute == pytest.approx(0.5 / 1.5)
    on_host = trace_of([_event("cpu_op", "aten::mm", 0, 10)])
    assert on_host.busy is None
    assert on_host.top[0].name == "aten::mm"


def _accepted(bench: Bench, run: ModelRun, more: tuple[str, ...]) -> tuple[int, float]:
    """The longest sample, and the operations of an average token."""
    from loongplug.training.arguments import parse_arguments

    torch.set_num_threads(1)
    data = data_of(run, folder=bench.folder)
    parse_arguments([*bench.run_flags(run, data, seq_length=run.seq_length), *more])
    return max(data.tokens_of_first(len(run.sides))), _flops_per_token(run=run, data=data)


@pytest.mark.parametrize(
    ("run", "more"),
    [
        (FULL.frozen, ("--packing", "--micro-batch-size", "1", "--disable-jit-fuser")),
        (FULL.trained, ("--micro-batch-size", "1", *SEPARATE, *OFFLOAD)),
        (FULL.experts, ("--micro-batch-size", "4")),
    ],
    ids=["frozen", "trained", "experts"],
)
def test_runs_of_full_sizes_are_accepted(
    run: ModelRun, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Flags and data; on the CPU, so that only what a GPU itself refuses is left."""
    bench = Bench(
        device="cpu", sizes=FULL, folder=tmp_path, rows=Rows(tmp_path / "rows"), ceiling=None
    )
    flags = (*more, "--train-iters", "8")
    longest, flops = bench.start(_accepted, bench=bench, run=run, more=flags).result()
    assert run.row_length - 64 < longest <= run.row_length  # little padding, in transformers too
    assert flops > 6e9
