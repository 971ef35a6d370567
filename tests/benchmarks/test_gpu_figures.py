"""What the driver's figures are made of: operations, a profile, waits, layers."""

import dataclasses
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from gpu_steps.bench import Bench
from gpu_steps.data import data_of
from gpu_steps.flops import matrices_of, sample_flops
from gpu_steps.host_waits import Waits, line_of
from gpu_steps.kernel_trace import trace_of
from gpu_steps.measured import _flops_per_token
from gpu_steps.models import config_of, hf_config_of
from gpu_steps.rows import Rows
from gpu_steps.sizes import FULL, TINY, ModelRun
from gpu_steps.step_trained import OFFLOAD, SEPARATE

import loongplug
from loongplug.verify.tiny_processor import write_processor

pytestmark = pytest.mark.quick

TINY_RUN = TINY.frozen


def test_operations_of_a_tiny_sample_by_hand() -> None:
    config = config_of(TINY_RUN)
    text, vision = config.foundation, config.image_encoder
    assert (text.num_layers, text.hidden_size, text.ffn_hidden_size) == (4, 128, 384)
    assert (vision.num_layers, vision.hidden_size, vision.ffn_hidden_size) == (3, 64, 128)
    assert vision.freeze
    # q 128 x 128, k and v 128 x 64 each, out 128 x 128, three of 128 x 384; output 128 x 128.
    decoder = 4 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 384) + 128 * 128
    assert matrices_of(config).decoder == decoder
    tokens, patches = 10, 16
    # Four of 64 x 64 and two of 64 x 128 a layer; a patch is 3 colors x 2 frames x 16 x 16.
    encoder = 3 * (4 * 64 * 64 + 2 * 64 * 128) + 3 * 2 * 16 * 16 * 64
    # One merger and two for deepstack, each of 256 x 256 and 256 x 128.
    projector = 3 * (256 * 256 + 256 * 128)
    by_hand = (
        6 * decoder * tokens
        # Forward: 4 operations x 10 x 10 pairs x 128 channels, half of them; backward twice that.
        + 3 * 4 * 4 * 100 * 128 // 2
        + 2 * encoder * patches
        + 4 * 16 * 16 * 64 * 3
        + 6 * projector * 4
    )
    assert sample_flops(config, tokens=tokens, frames=[patches]) == by_hand
    trained = dataclasses.replace(config, image_encoder=dataclasses.replace(vision, freeze=False))
    more = 4 * encoder * patches + 2 * 4 * 16 * 16 * 64 * 3
    assert sample_flops(trained, tokens=tokens, frames=[patches]) == by_hand + more


@pytest.mark.not_quick
@pytest.mark.parametrize("run", [FULL.frozen, FULL.trained, FULL.experts, TINY.experts])
def test_matrices_are_those_of_transformers(run: ModelRun, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    write_processor(tmp_path / "processor")
    found = matrices_of(config_of(run))
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
    assert counted == dataclasses.asdict(found)


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
