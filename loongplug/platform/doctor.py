"""``loongplug doctor``: what a machine has, what LoongPlug will use of it, what is in the way."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loongplug.platform.machine import MachineFacts, collect

GIB = 1024**3
LOW_MEMORY = 4 * GIB
LOW_SHARED_MEMORY = 1 * GIB

# The extra's packages are built against the torch that is installed.
GPU_INSTALL = "pip install --no-build-isolation '.[gpu]'"

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something in the way; an error prevents training."""

    severity: Severity
    text: str
    cure: str


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a run with this device takes."""

    device: str
    backend: str
    layers: str
    attention: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The whole answer."""

    facts: MachineFacts
    use: Use
    problems: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        """1 when something prevents training, else 0."""
        return int(any(problem.severity == "error" for problem in self.problems))

    def as_json(self) -> str:
        """The answer for programs."""
        return json.dumps(asdict(self), indent=2)


def doctor(*, device: str, as_json: bool) -> int:
    """Look at this machine, print what was found, and return the exit code.

    Raises ValueError for an unknown device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown: expected auto, cpu or cuda.")
    waiting = Console(stderr=True)
    with waiting.status("looking at this machine"):
        diagnosis = diagnose(collect(), device=device)
    if as_json:
        print(diagnosis.as_json())
    else:
        print_diagnosis(diagnosis, Console())
    return diagnosis.exit_code


def diagnose(facts: MachineFacts, *, device: str) -> Diagnosis:
    """Judge the facts for a run with ``device`` ("auto", "cpu" or "cuda")."""
    on_gpu = device == "cuda" or (device == "auto" and facts.cuda_usable)
    problems = (
        *_requirement_problems(facts),
        *(_gpu_problems(facts) if on_gpu else _cpu_problems(facts, asked=device)),
        *_package_problems(facts, on_gpu=on_gpu),
        *_memory_problems(facts),
    )
    return Diagnosis(facts=facts, use=_use(facts, on_gpu=on_gpu), problems=problems)


def _use(facts: MachineFacts, *, on_gpu: bool) -> Use:
    engine = on_gpu and _works(facts, "transformer-engine")
    if not engine:
        attention = "torch scaled_dot_product_attention"
    elif _works(facts, "flash-attn"):
        attention = "TransformerEngine with flash-attn or cuDNN"
    else:
        attention = "TransformerEngine with cuDNN"
    old = on_gpu and any(gpu.capability < (8, 0) for gpu in facts.gpus)
    return Use(
        device=f"cuda ({len(facts.gpus)} GPU)" if on_gpu else f"cpu ({facts.cores} cores)",
        backend="nccl" if on_gpu else "gloo",
        layers="TransformerEngine" if engine else "LoongPlug's own, on torch",
        attention=attention,
        precision="fp32" if old else "fp32, or bf16 with --bf16",
    )


def _works(facts: MachineFacts, package: str) -> bool:
    return facts.version(package) is not None and package not in facts.broken


def _requirement_problems(facts: MachineFacts) -> Iterator[Problem]:
    if facts.requires_python and not _fits(facts.python, SpecifierSet(facts.requires_python)):
        yield Problem(
            severity="error",
            text=f"Python is {facts.python}; LoongPlug needs {facts.requires_python}",
            cure="make the environment with such a Python: python3.12 -m venv .venv",
        )
    for text in facts.requirements:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate():
            continue
        found = facts.version(needed.name)
        wanted = f"{needed.name}{needed.specifier}"
        if found is None:
            yield Problem(
                severity="error",
                text=f"{needed.name} is not installed",
                cure=f"pip install '{wanted}'",
            )
        elif not _fits(found, needed.specifier):
            yield Problem(
                severity="error",
                text=f"{needed.name} is {found}; LoongPlug needs {needed.specifier}",
                cure=f"pip install '{wanted}'",
            )
    if facts.upstream_error is not None:
        yield Problem(
            severity="error",
            text=f"Megatron cannot be used: {facts.upstream_error}",
            cure="install a version of megatron-core and torch that pyproject.toml allows",
        )


def _fits(version: str, specifier: SpecifierSet) -> bool:
    return specifier.contains(version, prereleases=True)


def _gpu_problems(facts: MachineFacts) -> Iterator[Problem]:
    if not facts.cuda_usable:
        yield Problem(
            severity="error",
            text="device cuda was asked for, but torch sees no usable CUDA GPU",
            cure="use --device cpu, or " + _driver_cure(facts),
        )
        return
    if facts.nccl is None:
        yield Problem(
            severity="error",
            text="this torch has no NCCL, which ranks on GPUs talk through",
            cure="install torch from PyPI for Linux: pip install --force-reinstall torch",
        )
    if facts.version("transformer-engine") is None:
        yield Problem(
            severity="warning",
            text="TransformerEngine is not installed: LoongPlug's own layers are slower on a GPU",
            cure=f"in the checkout: {GPU_INSTALL}",
        )
    old = sorted({gpu.name for gpu in facts.gpus if gpu.capability < (8, 0)})
    if old:
        yield Problem(
            severity="warning",
            text=f"{', '.join(old)} cannot compute in bf16 at speed",
            cure="train without --bf16 there",
        )


def _cpu_problems(facts: MachineFacts, *, asked: str) -> Iterator[Problem]:
    if not facts.has_gloo and facts.version("torch") is not None:
        yield Problem(
            severity="error",
            text="this torch has no gloo, which ranks on CPUs talk through",
            cure="install torch from PyPI: pip install --force-reinstall torch",
        )
    if facts.has_nvidia_driver and not facts.cuda_usable and asked == "auto":
        yield Problem(
            severity="warning",
            text="there is an NVIDIA driver, but torch cannot use a GPU",
            cure=_driver_cure(facts),
        )


def _driver_cure(facts: MachineFacts) -> str:
    if facts.torch_cuda is None:
        return "install a torch that is built for CUDA: pip install --force-reinstall torch"
    return (
        f"install an NVIDIA driver for CUDA {facts.torch_cuda} and see that nvidia-smi lists "
        "the GPUs"
    )


def _package_problems(facts: MachineFacts, *, on_gpu: bool) -> Iterator[Problem]:
    for package, (kind, text) in facts.broken.items():
        # Upstream goes on without a package that raises ImportError, and falls with any other.
        absent = kind in ("ImportError", "ModuleNotFoundError")
        yield Problem(
            severity="warning" if absent else "error",
            text=f"{package} {facts.version(package)} is installed but does not import "
            f"({kind}: {text})",
            cure=f"pip uninstall {package}, then in the checkout: {GPU_INSTALL}"
            if on_gpu
            else f"pip uninstall {package}: a CPU run does not use it",
        )


def _memory_problems(facts: MachineFacts) -> Iterator[Problem]:
    if facts.available_memory_bytes < LOW_MEMORY:
        yield Problem(
            severity="warning",
            text=f"only {_gib(facts.available_memory_bytes)} of memory are available",
            cure="end other programs, or use fewer ranks: each takes about 1 GiB before its model",
        )
    free = facts.shared_memory_bytes
    if free is not None and free < LOW_SHARED_MEMORY:
        yield Problem(
            severity="warning",
            text=f"only {_gib(free)} are free in /dev/shm, which data workers and NCCL share "
            "memory through",
            cure="in a container: start it with --shm-size=8g or --ipc=host",
        )


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Three tables: what there is, what is used, what is in the way."""
    facts = diagnosis.facts
    machine = {
        "system": f"{facts.system}, {facts.cores} cores",
        "memory": f"{_gib(facts.memory_bytes)}, {_gib(facts.available_memory_bytes)} available",
        "/dev/shm": "none" if facts.shared_memory_bytes is None
        else f"{_gib(facts.shared_memory_bytes)} free",
        "Python": facts.python,
        **{name: facts.version(name) or "not installed" for name in facts.packages},
        "CUDA": _cuda_line(facts),
        "NCCL": facts.nccl or "none",
        "gloo": "yes" if facts.has_gloo else "none",
    }  # fmt: skip
    for index, gpu in enumerate(facts.gpus):
        major, minor = gpu.capability
        machine[f"GPU {index}"] = f"{gpu.name}, {_gib(gpu.memory_bytes)}, sm_{major}{minor}"
    _print_table(console, machine, title="This machine")
    _print_table(console, asdict(diagnosis.use), title="LoongPlug will use")
    if not diagnosis.problems:
        console.print("no problems found")
    for problem in diagnosis.problems:
        color = "red" if problem.severity == "error" else "yellow"
        console.print(f"[{color}]{problem.severity}[/]: {escape(problem.text)}")
        console.print(f"  cure: {escape(problem.cure)}")


def _print_table(console: Console, rows: dict[str, str], *, title: str) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print(table)


def _cuda_line(facts: MachineFacts) -> str:
    built = f"torch is built for {facts.torch_cuda}" if facts.torch_cuda else "torch has none"
    return f"{built}; {len(facts.gpus)} usable GPU(s)"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
