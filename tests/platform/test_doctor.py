"""The judgement on made-up facts, and the facts of this machine."""

import dataclasses
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rich.console import Console

import loongplug
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


def _only(facts: MachineFacts, *, device: str = "auto") -> tuple[str, str, str, int]:
    """The one problem, and the exit code."""
    diagnosis = diagnose(facts, device=device)
    assert len(diagnosis.problems) == 1, diagnosis.problems
    problem = diagnosis.problems[0]
    return problem.severity, problem.text, problem.cure, diagnosis.exit_code


def test_a_good_cpu_machine() -> None:
    diagnosis = diagnose(CPU, device="auto")
    assert diagnosis.problems == ()
    assert diagnosis.exit_code == 0
    use = diagnosis.use
    assert (use["device"], use["backend"]) == ("cpu (8 cores)", "gloo")
    assert "LoongPlug's own" in use["layers"]
    assert "scaled_dot_product_attention" in use["attention"]
    assert use[PARTS] == "LoongPlug's own, on torch's kernels"


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


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.19.1", False),
        ("0.19.2", True),
        ("0.19.9", True),
        ("0.20.0", False),
        ("0.20.0rc1", False),
    ],
)
def test_megatron_version(version: str, fits: bool) -> None:
    facts = _with(CPU, packages={"megatron-core": version})
    assert diagnose(facts, device="auto").exit_code == int(not fits)
    if not fits:
        severity, text, cure, _ = _only(facts)
        assert severity == "error"
        assert text == f"megatron-core is {version}; LoongPlug needs <0.20,>=0.19.2"
        assert cure == "pip install 'megatron-core<0.20,>=0.19.2'"


def test_missing_requirement() -> None:
    facts = _with(CPU, packages={"transformers": None})
    assert _only(facts) == (
        "error",
        "transformers is not installed",
        "pip install 'transformers<6,>=5.20'",
        1,
    )


def test_requirements_of_other_systems_are_passed_over() -> None:
    facts = _with(CPU, requirements=("triton>=9; sys_platform == 'plan9'",))
    assert diagnose(facts, device="auto").problems == ()


def test_old_python() -> None:
    severity, text, cure, code = _only(_with(CPU, python="3.11.9"))
    assert (severity, code) == ("error", 1)
    assert text == "Python is 3.11.9; LoongPlug needs >=3.12"
    assert "python3.12 -m venv" in cure


def test_megatron_that_cannot_be_used() -> None:
    error = "ReplacementError: megatron.training.x: expected the parameters (), found (y)"
    severity, text, _, code = _only(_with(CPU, upstream_error=error))
    assert (severity, code) == ("error", 1)
    assert error in text


def test_cuda_asked_for_without_a_gpu() -> None:
    severity, text, cure, code = _only(CPU, device="cuda")
    assert (severity, code) == ("error", 1)
    assert "no usable CUDA GPU" in text
    assert "--device cpu" in cure
    assert "CUDA 13.2" in cure


def test_driver_without_a_usable_gpu() -> None:
    facts = _with(CPU, has_nvidia_driver=True, torch_cuda=None)
    severity, text, cure, code = _only(facts)
    assert (severity, code) == ("warning", 0)
    assert "NVIDIA driver" in text
    assert "built for CUDA" in cure
    assert diagnose(facts, device="cpu").problems == ()


def test_gpu_without_nccl() -> None:
    assert _only(_with(GPU, nccl=None))[0::3] == ("error", 1)
    assert diagnose(_with(CPU, nccl=None), device="auto").problems == ()


def test_cpu_without_gloo() -> None:
    assert _only(_with(CPU, has_gloo=False))[0::3] == ("error", 1)


def test_gpu_without_transformer_engine() -> None:
    facts = _with(GPU, packages={"transformer-engine": None})
    severity, text, cure, code = _only(facts)
    assert (severity, code) == ("warning", 0)
    assert "slower" in text
    assert cure == "in the checkout: pip install --no-build-isolation '.[gpu]'"
    assert "LoongPlug's own" in diagnose(facts, device="auto").use["layers"]


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


def test_units_above_the_budget_of_a_pass_are_named() -> None:
    for facts in (CPU, GPU):
        named = diagnose(facts, device="auto").use["encoder's passes"]
        assert "up to joined_rows rows; what has more by itself" in named


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
    """None elsewhere is asked for by what there is; without one, doctor says something else."""
    asked = re.compile(
        r"(has|get)attr\((F|torch)[\w.]*, \"|backends\.\w+\.is_available|import varlen"
    )
    package = Path(loongplug.__file__).parent
    files = {file.name for file in package.rglob("*.py") if asked.search(file.read_text())}
    assert files == {"torch_kernels.py"}
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


@pytest.mark.parametrize(
    ("kind", "severity", "code"), [("ImportError", "warning", 0), ("OSError", "error", 1)]
)
def test_transformer_engine_that_does_not_import(kind: str, severity: str, code: int) -> None:
    facts = _with(GPU, broken={"transformer-engine": (kind, "libcudnn.so.9: cannot open")})
    found = _only(facts)
    assert (found[0], found[3]) == (severity, code)
    assert f"({kind}: libcudnn.so.9: cannot open)" in found[1]
    assert "LoongPlug's own" in diagnose(facts, device="auto").use["layers"]
    assert "uninstall" in _only(facts, device="cpu")[2]


def test_old_gpu() -> None:
    facts = _with(GPU, gpus=(H100, V100))
    severity, text, _, code = _only(facts)
    assert (severity, code) == ("warning", 0)
    assert text.startswith("Tesla V100 ")
    assert diagnose(facts, device="auto").use["precision"] == "fp32"


def test_little_memory() -> None:
    assert "1.5 GiB of memory" in _only(_with(CPU, available_memory_bytes=int(1.5 * GIB)))[1]
    severity, text, cure, _ = _only(_with(CPU, shared_memory_bytes=GIB // 16))
    assert severity == "warning"
    assert "0.1 GiB are free in /dev/shm" in text
    assert "--shm-size" in cure
    assert diagnose(_with(CPU, shared_memory_bytes=None), device="auto").problems == ()


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
