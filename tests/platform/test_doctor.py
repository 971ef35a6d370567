"""The judgement on made-up facts, and the facts of this machine."""

import dataclasses
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rich.console import Console

from loongplug.platform import machine, torch_kernels
from loongplug.platform.doctor import GIB, Diagnosis, diagnose, print_diagnosis
from loongplug.platform.machine import GpuFacts, MachineFacts, collect

pytestmark = pytest.mark.quick

H100 = GpuFacts(name="NVIDIA H100", memory_bytes=80 * GIB, capability=(9, 0))
V100 = GpuFacts(name="Tesla V100", memory_bytes=32 * GIB, capability=(7, 0))
PARTS = "attention over parts of rows"

CPU = MachineFacts(
    system="Linux x86_64",
    python="3.12.4",
    cores=8,
    memory_bytes=32 * GIB,
    available_memory_bytes=30 * GIB,
    shared_memory_bytes=16 * GIB,
    has_nvidia_driver=False,
    torch_cuda="13.2",
    cuda_usable=False,
    gpus=(),
    nccl="2.30.7",
    has_gloo=True,
    has_grouped=True,
    has_onednn=True,
    packages={
        "torch": "2.15.0+cpu",
        "megatron-core": "0.19.2",
        "transformers": "5.23.0",
        "transformer-engine": None,
        "flash-attn": None,
    },
    broken={},
    requirements=("megatron-core<0.20,>=0.19.2", "torch>=2.9", "transformers<6,>=5.20"),
    requires_python=">=3.12",
    upstream_error=None,
)
GPU = dataclasses.replace(
    CPU,
    has_nvidia_driver=True,
    cuda_usable=True,
    gpus=(H100, H100),
    packages={**CPU.packages, "transformer-engine": "2.9.0", "flash-attn": "2.8.3"},
)
# What finds a kernel: the fact, and a machine that would use it.
KERNELS = {
    "varlen_attention": ("has_varlen", GPU),
    "grouped_product": ("has_grouped", GPU),
    "onednn_product": ("has_onednn", CPU),
}


def _with(facts: MachineFacts, **changes: Any) -> MachineFacts:
    packages = {**facts.packages, **changes.pop("packages", {})}
    return dataclasses.replace(facts, packages=packages, **changes)


def test_a_good_cpu_machine() -> None:
    diagnosis = diagnose(CPU, device="auto")
    assert diagnosis.problems == ()
    assert diagnosis.exit_code == 0
    use = diagnosis.use
    assert (use["device"], use["backend"]) == ("cpu (8 cores)", "gloo")
    assert "LoongPlug's own" in use["layers"]
    assert "scaled_dot_product_attention" in use["attention"]
    assert use[PARTS] == "LoongPlug's own, on torch's kernels"
    assert "up to joined_rows rows" in use["encoder's passes"]


def test_a_good_gpu_machine() -> None:
    diagnosis = diagnose(GPU, device="auto")
    assert diagnosis.problems == ()
    use = diagnosis.use
    assert (use["device"], use["backend"]) == ("cuda (2 GPU)", "nccl")
    assert use["layers"] == "TransformerEngine"
    assert use["experts"] == "TransformerEngine's grouped linears"
    assert "flash-attn" in use["attention"]
    assert "TransformerEngine with flash-attn or cuDNN for padded rows" in use[PARTS]
    assert "else LoongPlug's own" in use[PARTS]
    assert "bf16" in use["precision"]


def test_the_cpu_of_a_gpu_machine() -> None:
    diagnosis = diagnose(GPU, device="cpu")
    assert diagnosis.problems == ()
    assert diagnosis.use["backend"] == "gloo"
    assert "TransformerEngine" not in diagnosis.use[PARTS]
    assert "LoongPlug's own" in diagnosis.use["layers"]  # TransformerEngine needs the GPU
    broken = _with(GPU, broken={"transformer-engine": ("ImportError", "no libcudnn")})
    assert "LoongPlug's own" in diagnose(broken, device="auto").use["layers"]
    assert diagnose(_with(GPU, gpus=(H100, V100)), device="auto").use["precision"] == "fp32"


OLD_MEGATRON = "megatron-core is 0.19.1; LoongPlug needs <0.20,>=0.19.2"
NO_LIBRARY = "libcudnn.so.9: cannot open"
# What is in the way of a run: the facts and the device; how grave it is, what it is, its cure.
PROBLEMS: dict[str, tuple[MachineFacts, str, str, str, str]] = {
    "a version that is too old": (
        _with(CPU, packages={"megatron-core": "0.19.1"}),
        *("auto", "error", OLD_MEGATRON, "pip install 'megatron-core<0.20,>=0.19.2'"),
    ),
    "one that is too new, before its release": (
        _with(CPU, packages={"megatron-core": "0.20.0rc1"}),
        *("auto", "error", "megatron-core is 0.20.0rc1; LoongPlug needs", "pip install"),
    ),
    "a requirement that is missing": (
        _with(CPU, packages={"transformers": None}),
        *("auto", "error", "transformers is not installed", "pip install 'transformers<6,>=5.20'"),
    ),
    "an old Python": (
        _with(CPU, python="3.11.9"),
        *("auto", "error", "Python is 3.11.9; LoongPlug needs >=3.12", "python3.12 -m venv"),
    ),
    "a Megatron that cannot be used": (
        _with(CPU, upstream_error="ReplacementError: expected the parameters ()"),
        *("auto", "error", "ReplacementError: expected the parameters ()", "install a version of"),
    ),
    "cuda without a GPU": (
        *(CPU, "cuda", "error", "no usable CUDA GPU"),
        "use --device cpu, or install an NVIDIA driver for CUDA 13.2",
    ),
    "a driver without a usable GPU": (
        _with(CPU, has_nvidia_driver=True, torch_cuda=None),
        *("auto", "warning", "there is an NVIDIA driver", "a torch that is built for CUDA"),
    ),
    "a GPU without NCCL": (
        _with(GPU, nccl=None),
        *("auto", "error", "this torch has no NCCL", "torch from PyPI for Linux"),
    ),
    "a CPU without gloo": (
        _with(CPU, has_gloo=False),
        *("auto", "error", "this torch has no gloo", "torch from PyPI"),
    ),
    "a GPU without TransformerEngine": (
        _with(GPU, packages={"transformer-engine": None}),
        *("auto", "warning", "slower on a GPU"),
        "in the checkout: pip install --no-build-isolation '.[gpu]'",
    ),
    "a TransformerEngine that upstream does without": (
        _with(GPU, broken={"transformer-engine": ("ImportError", NO_LIBRARY)}),
        *("auto", "warning", f"(ImportError: {NO_LIBRARY})", "pip uninstall transformer-engine"),
    ),
    "one that it falls with": (
        _with(GPU, broken={"transformer-engine": ("OSError", NO_LIBRARY)}),
        *("cpu", "error", f"(OSError: {NO_LIBRARY})", "a CPU run does not use it"),
    ),
    "an old GPU": (
        _with(GPU, gpus=(H100, V100)),
        *("auto", "warning", "Tesla V100 cannot compute in bf16", "train without --bf16"),
    ),
    "little memory": (
        _with(CPU, available_memory_bytes=int(1.5 * GIB)),
        *("auto", "warning", "1.5 GiB of memory", "use fewer ranks"),
    ),
    "little shared memory": (
        _with(CPU, shared_memory_bytes=GIB // 16),
        *("auto", "warning", "0.1 GiB are free in /dev/shm", "--shm-size"),
    ),
}


@pytest.mark.parametrize(
    ("facts", "device", "severity", "text", "cure"), PROBLEMS.values(), ids=PROBLEMS
)
def test_what_is_in_the_way_is_told_with_its_cure(
    facts: MachineFacts, device: str, severity: str, text: str, cure: str
) -> None:
    diagnosis = diagnose(facts, device=device)
    (problem,) = diagnosis.problems
    assert (problem.severity, diagnosis.exit_code) == (severity, int(severity == "error"))
    assert text in problem.text
    assert cure in problem.cure


@pytest.mark.parametrize(
    ("facts", "device"),
    [
        (_with(CPU, packages={"megatron-core": "0.19.9"}), "auto"),
        (_with(CPU, requirements=("triton>=9; sys_platform == 'plan9'",)), "auto"),
        (_with(CPU, has_nvidia_driver=True, torch_cuda=None), "cpu"),
        (_with(CPU, nccl=None, shared_memory_bytes=None), "auto"),
    ],
)
def test_what_a_run_does_not_need_is_no_problem(facts: MachineFacts, device: str) -> None:
    assert diagnose(facts, device=device).problems == ()


def test_attention_without_transformer_engine() -> None:
    def attention(facts: MachineFacts, **changes: Any) -> str:
        facts = _with(facts, packages={"transformer-engine": None}, **changes)
        return diagnose(facts, device="auto").use["attention"]

    assert attention(CPU, has_varlen=True) == "torch scaled_dot_product_attention"
    kernel = attention(GPU, has_varlen=True)
    assert "varlen_attn for packs" in kernel
    assert "a multiple of 8, up to 256" in kernel
    loop = "a call for each length"
    assert loop in attention(GPU, has_varlen=False)
    assert loop in attention(GPU, gpus=(H100, V100), has_varlen=True)


def test_experts_without_transformer_engine() -> None:
    def experts(facts: MachineFacts, **changes: Any) -> str:
        changes.setdefault("packages", {})["transformer-engine"] = None
        return diagnose(_with(facts, **changes), device="auto").use["experts"]

    alone = "LoongPlug's own, a product for each expert"
    assert experts(CPU) == alone
    grouped = "LoongPlug's own, with --bf16 by torch's grouped product"
    assert experts(GPU).startswith(f"{grouped}; a product for each expert if hidden size")
    assert experts(GPU).endswith("no multiple of 8")
    assert experts(GPU, gpus=(H100, V100)).startswith(f"{alone}: the GPUs are too old")
    assert experts(GPU, has_grouped=False).startswith(f"{alone}: this torch has no grouped")


def test_products_on_the_host() -> None:
    def products(facts: MachineFacts, **changes: Any) -> str:
        return diagnose(_with(facts, **changes), device="auto").use["products"]

    assert "by oneDNN" in products(CPU)
    assert products(CPU, has_onednn=False) == "torch's"
    assert products(GPU) == "TransformerEngine's"
    assert products(GPU, packages={"transformer-engine": None}) == "torch's"


def test_each_kernel_that_a_torch_may_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, doctor says something else."""
    own = inspect.getmembers(torch_kernels, inspect.isfunction)
    assert {name for name, _ in own} == KERNELS.keys()
    alone = {"transformer-engine": None}
    for name, (field, base) in KERNELS.items():
        facts = _with(base, packages=alone, **{field: True})
        lacks = _with(facts, **{field: False})
        assert diagnose(facts, device="auto").use != diagnose(lacks, device="auto").use
        with monkeypatch.context() as patched:
            patched.setattr(machine, name, lambda: None)
            assert not machine._seen_by_torch()[field]


def test_a_torch_without_them_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as F

    with monkeypatch.context() as patched:
        patched.delattr(F, "grouped_mm", raising=False)
        patched.setattr("torch.backends.mkldnn.is_available", lambda: False)
        assert torch_kernels.grouped_product() is None
        assert torch_kernels.onednn_product() is None
    monkeypatch.setattr("torch.ops.mkldnn", object())
    assert torch_kernels.onednn_product() is None


def test_every_problem_is_printed_with_its_cure() -> None:
    facts = _with(CPU, python="3.11.0", broken={"flash-attn": ("OSError", "[/odd markup]")})
    facts = _with(facts, packages={"flash-attn": "2.8", "torch": None}, requirements=("torch>=2",))
    diagnosis = diagnose(facts, device="auto")
    assert len(diagnosis.problems) == 3
    console = Console(file=io.StringIO(), width=400)
    print_diagnosis(diagnosis, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for problem in diagnosis.problems:
        assert f"{problem.severity}: {problem.text}" in printed
        assert f"cure: {problem.cure}" in printed
    assert "not installed" in printed
    assert "8 cores" in printed


def test_json_holds_everything() -> None:
    answer = json.loads(diagnose(GPU, device="cuda").as_json())
    assert answer["facts"]["gpus"][1]["name"] == "NVIDIA H100"
    assert answer["use"]["backend"] == "nccl"
    assert answer["problems"] == []


def _collect(rank: int) -> Diagnosis:
    return diagnose(collect(deep=True), device="cpu")


def test_this_machine() -> None:
    """In a rank of its own, because collecting ends the platform that it looked at."""
    (diagnosis,) = run_ranks(_collect, 1)
    facts = diagnosis.facts
    assert facts.packages["megatron-core"]
    assert any(text.startswith("megatron-core") for text in facts.requirements)
    assert facts.requires_python == ">=3.12"
    assert facts.upstream_error is None
    assert facts.has_gloo
    assert facts.cores >= 1
    assert 0 < facts.available_memory_bytes <= facts.memory_bytes
    assert [p for p in diagnosis.problems if p.severity == "error"] == []


def test_a_tested_megatron_is_not_imported_and_libraries_say_nothing() -> None:
    code = """
import sys
from loongplug.platform.doctor import doctor
doctor(device="cpu", as_json=True, deep=False)
assert not [name for name in sys.modules if name.startswith("megatron")]
"""
    environment = {**os.environ, "CUDA_HOME": str(Path(__file__).parent)}  # which torch would note
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
