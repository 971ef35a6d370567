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

from loongplug.consoles import table_console
from loongplug.platform import torch_kernels
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
class Diagnosis:
    """The whole answer; ``use`` is what a run takes, as device, layers and precision."""

    facts: MachineFacts
    use: dict[str, str]
    problems: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        """1 when something prevents training, else 0."""
        return int(any(problem.severity == "error" for problem in self.problems))

    def as_json(self) -> str:
        """The answer for programs."""
        return json.dumps(asdict(self), indent=2)


def doctor(*, device: str, as_json: bool, deep: bool = False) -> int:
    """Look at this machine, print what was found, and return the exit code.

    ``deep`` is :func:`~loongplug.platform.machine.collect`'s. Raises ValueError for an unknown
    device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown: expected auto, cpu or cuda.")
    waiting = Console(stderr=True)
    with waiting.status("looking at this machine"):
        diagnosis = diagnose(collect(deep=deep), device=device)
    if as_json:
        print(diagnosis.as_json())
    else:
        print_diagnosis(diagnosis, table_console())
    return diagnosis.exit_code


def diagnose(facts: MachineFacts, *, device: str) -> Diagnosis:
    """Judge the facts for a run with ``device`` ("auto", "cpu" or "cuda")."""
    on_gpu = device == "cuda" or (device == "auto" and facts.cuda_usable)
    problems = tuple(
        Problem(severity=severity, text=text, cure=cure)
        for found, severity, text, cure in _checks(facts, on_gpu=on_gpu, asked=device)
        if found
    )
    return Diagnosis(facts=facts, use=_use(facts, on_gpu=on_gpu), problems=problems)


def _use(facts: MachineFacts, *, on_gpu: bool) -> dict[str, str]:
    def works(package: str) -> bool:
        return facts.packages.get(package) is not None and package not in facts.broken

    use = {
        "device": f"cuda ({len(facts.gpus)} GPU)" if on_gpu else f"cpu ({facts.cores} cores)",
        "backend": "nccl" if on_gpu else "gloo",
        "layers": "LoongPlug's own, on torch",
        "attention": _attention(facts, on_gpu=on_gpu),
        "attention over parts of rows": "LoongPlug's own, on torch's kernels",
        "experts": _experts(facts, on_gpu=on_gpu),
        "encoder's passes": "in full separation several microbatches' media, up to joined_rows "
        "rows; what has more by itself",
        "products": _products(facts, on_gpu=on_gpu),
        "optimizer": "torch's Adam, fused",
        "precision": "fp32" if on_gpu and _old_gpus(facts) else "fp32, or bf16 with --bf16",
    }
    if on_gpu and works("transformer-engine"):
        by = "with flash-attn or cuDNN" if works("flash-attn") else "with cuDNN"
        use |= {
            "layers": "TransformerEngine",
            "attention": f"TransformerEngine {by}",
            "attention over parts of rows": f"TransformerEngine {by} for padded rows with --bf16, "
            "else LoongPlug's own, on torch's kernels",
            "products": "TransformerEngine's",
            "optimizer": "TransformerEngine's Adam",
            "experts": "TransformerEngine's grouped linears",
        }
    return use


def _attention(facts: MachineFacts, *, on_gpu: bool) -> str:
    """What this package's own layers compute attention by."""
    plain = "torch scaled_dot_product_attention"
    if not on_gpu:
        return plain
    if _old_gpus(facts) or not facts.has_varlen:
        return f"{plain}, a call for each length of a pack's samples or an image's frames"
    return (
        f"{plain}, with --bf16 torch varlen_attn for packs and images if a head's channels are a "
        f"multiple of {torch_kernels.HEAD_ALIGNMENT}, up to {torch_kernels.WIDEST_HEAD}"
    )


def _experts(facts: MachineFacts, *, on_gpu: bool) -> str:
    """How this package's own layers compute the linears of a rank's experts."""
    loop = "LoongPlug's own, a product for each expert"
    if not on_gpu:
        return loop
    if _old_gpus(facts):
        return f"{loop}: the GPUs are too old for torch's grouped product"
    if not facts.has_grouped:
        return f"{loop}: this torch has no grouped product (2.10 has one)"
    return (
        "LoongPlug's own, with --bf16 by torch's grouped product; a product for each expert if "
        "hidden size or a rank's part of an expert is no multiple of "
        f"{torch_kernels.GROUPED_ALIGNMENT}"
    )


def _products(facts: MachineFacts, *, on_gpu: bool) -> str:
    """What this package's own linears compute their products by."""
    if on_gpu or not facts.has_onednn:
        return "torch's"
    return "torch's, large ones of fp32 layers by oneDNN where a rank has the whole linear"


# Whether it is in the way; what it is; its cure.
_Check = tuple[bool, Severity, str, str]


def _checks(facts: MachineFacts, *, on_gpu: bool, asked: str) -> Iterator[_Check]:
    """All that is looked at, the gravest first."""
    yield from _requirements(facts)
    yield (
        facts.upstream_error is not None,
        "error",
        f"Megatron cannot be used: {facts.upstream_error}",
        "install a version of megatron-core and torch that pyproject.toml allows",
    )
    driver = "install a torch that is built for CUDA: pip install --force-reinstall torch"
    if facts.torch_cuda is not None:
        driver = (
            f"install an NVIDIA driver for CUDA {facts.torch_cuda} and see that nvidia-smi lists "
            "the GPUs"
        )
    on_usable = on_gpu and facts.cuda_usable
    yield (
        on_gpu and not facts.cuda_usable,
        "error",
        "device cuda was asked for, but torch sees no usable CUDA GPU",
        f"use --device cpu, or {driver}",
    )
    yield (
        not on_gpu and not facts.has_gloo and facts.packages.get("torch") is not None,
        "error",
        "this torch has no gloo, which ranks on CPUs talk through",
        "install torch from PyPI: pip install --force-reinstall torch",
    )
    yield (
        facts.has_nvidia_driver and not facts.cuda_usable and asked == "auto",
        "warning",
        "there is an NVIDIA driver, but torch cannot use a GPU",
        driver,
    )
    yield (
        on_usable and facts.nccl is None,
        "error",
        "this torch has no NCCL, which ranks on GPUs talk through",
        "install torch from PyPI for Linux: pip install --force-reinstall torch",
    )
    yield (
        on_usable and facts.packages.get("transformer-engine") is None,
        "warning",
        "TransformerEngine is not installed: LoongPlug's own layers are slower on a GPU",
        f"in the checkout: {GPU_INSTALL}",
    )
    old = _old_gpus(facts)
    yield (
        on_usable and bool(old),
        "warning",
        f"{', '.join(old)} cannot compute in bf16 at speed",
        "train without --bf16 there",
    )
    use = f", then in the checkout: {GPU_INSTALL}" if on_gpu else ": a CPU run does not use it"
    for package, (kind, text) in facts.broken.items():
        # Upstream goes on without a package that raises ImportError, and falls with any other.
        absent = kind in ("ImportError", "ModuleNotFoundError")
        there = f"{package} {facts.packages.get(package)} is installed but does not import"
        yield (
            True,
            "warning" if absent else "error",
            f"{there} ({kind}: {text})",
            f"pip uninstall {package}{use}",
        )
    yield (
        facts.available_memory_bytes < LOW_MEMORY,
        "warning",
        f"only {_gib(facts.available_memory_bytes)} of memory are available",
        "end other programs, or use fewer ranks: each takes about 1 GiB before its model",
    )
    free = facts.shared_memory_bytes
    yield (
        free is not None and free < LOW_SHARED_MEMORY,
        "warning",
        f"only {_gib(free or 0)} are free in /dev/shm, which data workers and NCCL share "
        "memory through",
        "in a container: start it with --shm-size=8g or --ipc=host",
    )


def _requirements(facts: MachineFacts) -> Iterator[_Check]:
    needed = SpecifierSet(facts.requires_python or "")
    yield (
        not _fits(facts.python, needed),
        "error",
        f"Python is {facts.python}; LoongPlug needs {facts.requires_python}",
        "make the environment with such a Python: python3.12 -m venv .venv",
    )
    for each in map(Requirement, facts.requirements):
        if each.marker is not None and not each.marker.evaluate():
            continue
        found = facts.packages.get(each.name)
        text = f"{each.name} is not installed"
        if found is not None:
            text = f"{each.name} is {found}; LoongPlug needs {each.specifier}"
        missing = found is None or not _fits(found, each.specifier)
        yield missing, "error", text, f"pip install '{each.name}{each.specifier}'"


def _fits(version: str, specifier: SpecifierSet) -> bool:
    return specifier.contains(version, prereleases=True)


def _old_gpus(facts: MachineFacts) -> list[str]:
    """The names of those that cannot compute in bf16 at speed."""
    return sorted({gpu.name for gpu in facts.gpus if gpu.capability < torch_kernels.CAPABILITY})


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Three tables: what there is, what is used, what is in the way."""
    facts = diagnosis.facts
    shared, cuda = facts.shared_memory_bytes, facts.torch_cuda
    built = f"torch is built for {cuda}" if cuda else "torch has none"
    machine = {
        "system": f"{facts.system}, {facts.cores} cores",
        "memory": f"{_gib(facts.memory_bytes)}, {_gib(facts.available_memory_bytes)} available",
        "/dev/shm": "none" if shared is None else f"{_gib(shared)} free",
        "Python": facts.python,
        **{name: facts.packages[name] or "not installed" for name in facts.packages},
        "CUDA": f"{built}; {len(facts.gpus)} usable GPU(s)",
        "NCCL": facts.nccl or "none",
        "gloo": "yes" if facts.has_gloo else "none",
    }
    for index, gpu in enumerate(facts.gpus):
        major, minor = gpu.capability
        machine[f"GPU {index}"] = f"{gpu.name}, {_gib(gpu.memory_bytes)}, sm_{major}{minor}"
    for title, rows in (
        ("This machine", machine),
        ("LoongPlug will use", diagnosis.use),
    ):
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, escape(value))
        console.print(table)
    if not diagnosis.problems:
        console.print("no problems found")
    for problem in diagnosis.problems:
        color = "red" if problem.severity == "error" else "yellow"
        console.print(f"[{color}]{problem.severity}[/]: {escape(problem.text)}")
        console.print(f"  cure: {escape(problem.cure)}")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
