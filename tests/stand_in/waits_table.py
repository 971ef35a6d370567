"""The table of ``docs/gpu_checks.md``: what makes the host wait, by mode. Prints it.

``PYTHONPATH=tests python -m stand_in.waits_table``
"""

import io
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import conftest  # noqa: F401 - the CPU platform, before the others import Megatron
from parity.cells import Cell
from parity.matrix import Matrix
from parity.placed import placed

from stand_in.runs import OVERLAP, train, trained
from stand_in.waits import IN_A_MICROBATCH, PHASES, Wait, between_microbatches

OFFLOADS = (
    *("--full-hetero-dp-cpu-offload", "--offload-encoder-activations", "--offload-encoder-state"),
    "--use-distributed-optimizer",
)


def modes() -> dict[str, tuple[Cell, tuple[str, ...]]]:
    """What is run, by the name that the table has for it."""
    qwen3, qwen2_5, experts = "qwen3_vl_tiny", "qwen2_5_vl_tiny", "qwen3_vl_moe_tiny"
    full = Cell(model=qwen3, mode="full-hetero-dp", pp=2)
    return {
        "one rank": (Cell(model=qwen3), ()),
        "uniform, TP2, sequence parallel": (
            Cell(model=qwen3, encoder_tp=2, tp=2, sequence_parallel=True),
            (),
        ),
        "heterogeneous DP, TP2": (Cell(model=qwen2_5, mode="encoder-hetero-dp", tp=2), ()),
        "full separation, PP2": (full, ()),
        "full separation, PP2, VPP2, deepstack layers on two stages": (virtual(qwen3), ()),
        "full separation, PP2, VPP2, no deepstack layers": (virtual(qwen2_5), ()),
        "full separation, PP2, all offloads": (full, OFFLOADS),
        "packing, TP2": (Cell(model=qwen3, encoder_tp=2, tp=2), ("--packing",)),
        "experts, TP2, EP2": (
            Cell(model=experts, encoder_tp=2, tp=2, ep=2, sequence_parallel=True),
            (),
        ),
        "the same with the MoE overlap and its offload": (
            OVERLAP,
            (),
        ),
        "encoder on a rank of its own, TP2": (placed("2/1/1|1/1/1"), ()),
        "encoder of two stages on their own ranks": (placed("1/1/1|1/2/1"), ()),
    }


def virtual(model: str) -> Cell:
    """Full separation over two stages of two chunks."""
    return Cell(model=model, mode="full-hetero-dp", pp=2, vpp=2)


def waits_of(cell: Cell, more: tuple[str, ...], matrix: Matrix) -> Counter[Wait]:
    """Of one step on the rank that has most of them, inside microbatches before all."""
    flags = [*matrix.base(cell), *cell.flags(), *more, "--train-iters", "1"]
    with redirect_stdout(io.StringIO()):
        found = train(trained, flags, ranks=cell.ranks)
    return max(
        map(Counter, found),
        key=lambda each: (_in(each, IN_A_MICROBATCH), sum(between_microbatches(each)[:2])),
    )


def row(name: str, cell: Cell, waits: Counter[Wait]) -> str:
    """One line of the table."""
    inside = _in(waits, IN_A_MICROBATCH) / cell.microbatches
    known, shapes, others = between_microbatches(waits)
    assert not others, others
    named = {f"{wait.kind} in {wait.line}" for wait in waits if wait.part in IN_A_MICROBATCH}
    return (
        f"| {name} | {inside:g} | {_in(waits, PHASES)} | {shapes} | {known} |"
        f" {'; '.join(sorted(named)) or 'none'} |"
    )


def _in(waits: Counter[Wait], parts: tuple[str, ...]) -> int:
    return sum(count for wait, count in waits.items() if wait.part in parts)


def main() -> None:
    """Run every mode; a line goes out as soon as it is known."""
    print("| mode | in a microbatch | phases 1 and 3 | shapes | rest of a step |", end="")
    print(" in a microbatch, where |")
    print("| --- | --- | --- | --- | --- | --- |")
    with TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        for name, (cell, more) in modes().items():
            print(row(name, cell, waits_of(cell, more, matrix)))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
