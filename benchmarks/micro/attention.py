"""SDPAttention against Megatron's own unfused attention: time and peak memory on the CPU."""

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from loongplug.platform import activate, current_platform

SDPA, UNFUSED = "SDPAttention", "DotProductAttention"
PATIENCE_SECONDS = 600


@dataclass(frozen=True)
class Side:
    """One attention: seconds of each forward plus backward, and the memory one adds at most."""

    name: str
    seconds: tuple[float, ...]
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """What was measured, and with which sizes; causal, float32, batch of one."""

    sequence_length: int
    heads: int
    head_dim: int
    threads: int
    sdpa: Side
    unfused: Side

    @property
    def speedup(self) -> float:
        """How many times faster SDPAttention is, median against median."""
        return median(self.unfused.seconds) / median(self.sdpa.seconds)

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.write_text(json.dumps({**asdict(self), "speedup": self.speedup}, indent=2) + "\n")


def run(
    *,
    sequence_length: int = 2048,
    heads: int = 8,
    head_dim: int = 64,
    rounds: int = 9,
    threads: int | None = None,
    json_path: Path | None = None,
) -> AttentionFigures:
    """Measure, print a table, and write the figures to ``json_path`` if given.

    ``threads`` are torch's during the timing, by default all cores this process may use.
    See :func:`measure` for what the process must not have.
    """
    figures = measure(
        sequence_length=sequence_length,
        heads=heads,
        head_dim=head_dim,
        rounds=rounds,
        threads=threads or len(os.sched_getaffinity(0)),
    )
    _print(figures)
    if json_path is not None:
        figures.write(json_path)
    return figures


def measure(
    *, sequence_length: int, heads: int, head_dim: int, rounds: int, threads: int
) -> AttentionFigures:
    """Both sides on the same inputs: memory in a child each, then time in interleaved rounds.

    Activates the CPU platform. The children are forked, so this process must not have computed
    with several threads, nor have a process group.

    Raises:
        ValueError: a size, ``rounds`` or ``threads`` is below 1.
        RuntimeError: the process has a process group, or a child failed.
    """
    sizes = {
        "sequence_length": sequence_length,
        "heads": heads,
        "head_dim": head_dim,
        "rounds": rounds,
        "threads": threads,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: expected at least 1.")
    if dist.is_initialized():
        raise RuntimeError("bench attention needs a process without a process group of its own")
    activate("cpu")
    case = _Case(sequence_length=sequence_length, heads=heads, head_dim=head_dim)
    peaks = {name: _in_child(_peak_bytes, case, name=name) for name in (SDPA, UNFUSED)}
    seconds = _in_child(_seconds, case, rounds=rounds, threads=threads)
    sides = {name: Side(name, seconds[name], peaks[name]) for name in (SDPA, UNFUSED)}
    return AttentionFigures(
        sequence_length=sequence_length,
        heads=heads,
        head_dim=head_dim,
        threads=threads,
        sdpa=sides[SDPA],
        unfused=sides[UNFUSED],
    )


@dataclass(frozen=True, kw_only=True)
class _Case:
    sequence_length: int
    heads: int
    head_dim: int

    def step(self, name: str) -> Callable[[], None]:
        """One forward plus backward of the named side, on inputs made here."""
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        from loongplug.models.layers.attention import SDPAttention

        config = TransformerConfig(
            num_layers=1,
            hidden_size=self.heads * self.head_dim,
            num_attention_heads=self.heads,
            attention_dropout=0.0,
        )
        classes = {SDPA: SDPAttention, UNFUSED: DotProductAttention}
        attention = classes[name](
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
        )
        generator = torch.Generator().manual_seed(0)
        shape = (self.sequence_length, 1, self.heads, self.head_dim)
        q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
        grad = torch.randn(self.sequence_length, 1, config.hidden_size, generator=generator)

        def forward_backward() -> None:
            q.grad = k.grad = v.grad = None
            # Without a mask tensor, both take the causal mask from their type.
            attention(q, k, v, None).backward(grad)

        return forward_backward


def _seconds(case: _Case, *, rounds: int, threads: int) -> dict[str, tuple[float, ...]]:
    """Seconds per step of each side; a round holds one step of each, so that both see the
    same neighbours on the machine."""
    torch.set_num_threads(threads)
    steps = {name: case.step(name) for name in (SDPA, UNFUSED)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = perf_counter()
            step()
            if number > 0:  # the first round warms up
                seconds[name].append(perf_counter() - start)
    return {name: tuple(values) for name, values in seconds.items()}


def _peak_bytes(case: _Case, *, name: str) -> int:
    """Bytes that one step needs at most, inputs included; for a process of its own."""
    torch.set_num_threads(1)
    # What a first call adds, kernels' code and the like, is no part of the attention's need.
    replace(case, sequence_length=16).step(name)()
    platform = current_platform()
    platform.reset_peak_memory()
    before = platform.peak_memory_bytes()
    case.step(name)()
    return platform.peak_memory_bytes() - before


def _in_child[Result](function: Callable[..., Result], case: _Case, **options: Any) -> Result:
    """``function(case, **options)`` in a forked process that ends before this returns.

    A child also keeps gloo's threads out of this process, which it could not be forked with.
    """
    # Imported before the fork, so that the imports are not counted and happen once.
    import loongplug.models.layers.attention  # noqa: F401

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, partial(function, case, **options)))
    child.start()
    sender.close()
    try:
        if not receiver.poll(PATIENCE_SECONDS):
            raise RuntimeError(
                f"{function.__name__} gave nothing for {PATIENCE_SECONDS} s: the sizes are too "
                "large for this machine, or this process had computed with several threads, "
                "which do not survive a fork."
            )
        result: Result = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} failed; its process said why above") from None
    finally:
        child.kill()
        child.join()
    return result


def _send(sender: "Connection[Any, Any]", function: Callable[[], Any]) -> None:
    """In the child: a parallel state of one rank, which Megatron's attention asks for."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    sender.send(function())


def _print(figures: AttentionFigures) -> None:
    table = Table(
        "attention",
        "ms, median (range)",
        "peak memory, MiB",
        title=(
            f"forward + backward, {figures.sequence_length:,} tokens, {figures.heads} heads of "
            f"{figures.head_dim}, {figures.threads} thread(s)"
        ),
        caption=f"SDPAttention is {figures.speedup:.1f} times faster",
    )
    for side in (figures.sdpa, figures.unfused):
        times = [seconds * 1e3 for seconds in side.seconds]
        table.add_row(
            side.name,
            f"{median(times):,.1f} ({min(times):,.1f} to {max(times):,.1f})",
            f"{side.peak_memory_bytes / 2**20:,.0f}",
        )
    Console().print(table)
