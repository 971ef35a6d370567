"""What the driver's figures are made of: operations, a profile, waits, layers."""

import traceback
import warnings
from pathlib import Path

import pytest
import torch
from gpu_steps.bench import Bench
from gpu_steps.data import data_of
from gpu_steps.host_waits import Waits, line_of
from gpu_steps.kernel_trace import trace_of
from gpu_steps.measured import _flops_per_token
from gpu_steps.models import amounts_of, hf_config_of
from gpu_steps.rows import Rows
from gpu_steps.sizes import FULL, TINY, ModelRun
from gpu_steps.step_trained import OFFLOAD, SEPARATE

import loongplug
from loongplug.verify.tiny_processor import write_processor

pytestmark = pytest.mark.quick


def test_work_of_a_run_is_that_of_what_it_trains() -> None:
    for run, trains in ((TINY.frozen, False), (TINY.trained, True)):
        eyes, text = amounts_of(run).entries.values()
        assert bool(eyes.backward) is trains
        assert all(each.backward["states"] for each in eyes.beside if each.forward["states"])
        assert text.backward == text.forward + text.forward


@pytest.mark.not_quick
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


def test_waits_are_told_by_the_projects_line() -> None:
    package = Path(loongplug.__file__).parent
    stack = [
        traceback.FrameSummary(str(package / "training" / "run.py"), 10, "run"),
        traceback.FrameSummary(str(package / "models" / "features.py"), 68, "of"),
        traceback.FrameSummary("/venv/site-packages/torch/functional.py", 5, "split"),
        traceback.FrameSummary(__file__, 1, "test"),
    ]
    torch_line = "/venv/site-packages/torch/functional.py"
    assert line_of(stack, filename=torch_line, lineno=5) == (
        "loongplug/models/features.py:68 (torch/functional.py:5)"
    )
    assert line_of(stack[2:], filename=torch_line, lineno=5) == "torch/functional.py:5"
    shown = warnings.showwarning
    waits = Waits("cpu")
    for number in range(2):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        if number == 0:
            waits.update_begins()
    warnings.warn("something else", stacklevel=1)
    (found,) = waits.end()
    assert (found.times, found.before_update) == (2, 1)
    assert found.where.startswith("benchmarks/test_gpu_figures.py:")
    assert warnings.showwarning is shown


def _accepted(bench: Bench, run: ModelRun, more: tuple[str, ...]) -> tuple[int, float]:
    """The longest sample, and the operations of an average token."""
    from loongplug.training.arguments import parse_arguments

    torch.set_num_threads(1)
    data = data_of(run, folder=bench.folder)
    parse_arguments([*bench.run_flags(run, data, seq_length=run.seq_length), *more])
    return max(data.tokens_of_first(len(run.sides))), _flops_per_token(run=run, data=data)


@pytest.mark.not_quick
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
