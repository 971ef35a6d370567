"""Live activation bytes of a decoder with experts, for each way to hold less of them."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loongplug.consoles import threadless_bars
from loongplug.verify.forked_runs import device_of, preload
from micro.memory_plan import BOTH, FULL, Work, ways, write_data
from micro.memory_rank import Held, held

SAME, APART = 0, 1  # exit codes: losses of all rows
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way, and what each rank held at its fullest in one step."""

    name: str
    flags: tuple[str, ...]
    ranks: tuple[Held, ...]

    @property
    def device(self) -> int:
        """Bytes of the fullest rank."""
        return max(each.device_bytes for each in self.ranks)

    @property
    def host(self) -> int:
        """Bytes that have left the fullest rank's device."""
        return max(each.host_bytes for each in self.ranks)


def bench_memory(
    *, layers: int, seq_length: int, stages: int, device: str, json_path: Path | None
) -> int:
    """Measure, print a table, write the figures to ``json_path`` if given.

    Gives APART where the losses of two rows differ in a bit.

    Raises:
        ValueError: the sizes cannot be used.
        RankError: a run failed otherwise.
    """
    chunks = 2 if stages > 1 else 1  # the overlap asks for virtual stages where there are stages
    if stages < 1 or layers < 1 or layers % (stages * chunks):
        raise ValueError(
            f"--layers is {layers} and --stages {stages}: expected layers that divide over the"
            f" {stages * chunks} virtual stages (two of each stage)."
        )
    if seq_length < 128:
        raise ValueError(f"--seq-length is {seq_length}: expected at least 128.")
    work = Work(
        layers=layers,
        seq_length=seq_length,
        ranks=2 * stages,
        stages=stages,
        chunks=chunks,
        microbatches=max(3, 2 * stages),
    )
    rows = measure(work, device=device)
    console = Console()
    console.print(_table(rows, work))
    same = agree(rows)
    whole, both = (_find(rows, name).device for name in (FULL, BOTH))
    console.print(f"{BOTH}: {both / whole:.2f} of what {FULL} holds (the target is 1.10 at most)")
    console.print(
        "losses: the same bits in all rows" if same else "losses: they differ between rows"
    )
    if json_path is not None:
        content = {"work": asdict(work), "rows": [_content(row) for row in rows]}
        json_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return SAME if same else APART


def measure(work: Work, *, device: str) -> list[Row]:
    """Every way in turn, on the same data from the same weights. Raises as above."""
    table = ways()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="loongplug-memory-") as name,
        threadless_bars() as progress,
    ):
        root = Path(name)
        chosen = device_of(["--device", device], folder=root)
        preload(chosen)
        write_data(root / "data", work=work)
        task = progress.add_task("steps", total=len(table) * work.steps)

        def stepped() -> None:
            progress.advance(task)
            progress.refresh()

        for number, (way, flags) in enumerate(table.items()):
            found = held(
                [*work.flags(root / "data", device=chosen), *flags],
                ranks=work.ranks,
                device=chosen,
                folder=root / f"run-{number}",
                on_step=stepped,
            )
            rows.append(Row(name=way, flags=flags, ranks=tuple(found)))
    return rows


def agree(rows: Sequence[Row]) -> bool:
    """Whether every step's loss is the same number in all rows."""
    return len({each.losses for row in rows for each in row.ranks}) == 1


def _find(rows: Sequence[Row], name: str) -> Row:
    (found,) = (row for row in rows if row.name == name)
    return found


def _content(row: Row) -> dict[str, object]:
    return asdict(row) | {"device_bytes": row.device, "host_bytes": row.host}


def _table(rows: Sequence[Row], work: Work) -> Table:
    whole = _find(rows, FULL).device
    stages = f"{work.stages} stages of {work.chunks} chunks, " if work.stages > 1 else ""
    table = Table(
        title=f"{work.layers} layers of {work.experts} experts, {work.seq_length} tokens of width "
        f"{work.hidden_size}, {stages}{work.ranks} ranks",
        caption="most bytes of a step on the fullest rank, without weights, gradient buffers and "
        "the optimizer's state",
    )
    table.add_column("way", no_wrap=True)
    for title in ("MiB on\nthe device", "x whole layers\nrecomputed", "MiB on\nthe host"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.device / _MIB:.2f}",
            f"{row.device / whole:.2f}",
            f"{row.host / _MIB:.2f}" if row.host else "",
        )
    return table
