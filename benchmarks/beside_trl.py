"""LoongPlug beside TRL's SFTTrainer: the same model, rows, batch and precision on two CPU ranks.

    python -m venv runs/trl && runs/trl/bin/pip install -e . trl==1.16.0 datasets==5.2.0
    runs/trl/bin/python benchmarks/beside_trl.py

Sides take turns, a whole run each. Both start from the same weights and see the same microbatches;
that their losses agree shows that they do the same work.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from beside_ranks import LEARNING_RATE, RankNotes, TrlSettings
from modes.levels_work import SEQ_LENGTH, Work, write_levels_data
from rich.table import Table

from loongplug.bench.step import spread
from loongplug.consoles import table_console
from loongplug.data.sample_order import epoch_permutation

RANKS, SEED = 2, 1234
WARMUP = 1  # the first step, as in the metrics of a run
LOSS_APART = 1e-4
TRL = "TRL, DDP"
UNIFORM, FULL = "DP2, uniform", "DP2, full separation"
LAYOUTS = {
    UNIFORM: (),
    FULL: ("--enable-full-hetero-dp",),
    "PP2, full separation": ("--enable-full-hetero-dp", "--pipeline-model-parallel-size", "2"),
    "TP2, uniform": ("--tensor-model-parallel-size", "2"),
}
# By the command line, not by a bare call of `run`: whose layout each has.
COMMANDS = {f"loongplug train: {layout}": layout for layout in (UNIFORM, FULL)}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and the batch that it is trained with; a row has five or six small images."""

    decoder_layers: int
    decoder_size: int
    encoder_layers: int
    encoder_size: int
    micro_batch_size: int
    accumulation: int = 4  # microbatches of a rank in a step, where both ranks are replicas

    @property
    def rows_per_step(self) -> int:
        """Of all ranks."""
        return self.micro_batch_size * self.accumulation * RANKS

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the tiny Qwen3-VL: heads are 32 channels wide, MLPs three times the model."""
        encoder = Work(
            decoder_layers=self.decoder_layers,
            encoder_layers=self.encoder_layers,
            encoder_size=self.encoder_size,
        )
        return (
            *encoder.overrides,
            f"model.foundation.hidden_size={self.decoder_size}",
            f"model.foundation.ffn_hidden_size={3 * self.decoder_size}",
            f"model.foundation.num_attention_heads={self.decoder_size // 32}",
            f"model.foundation.num_query_groups={self.decoder_size // 64}",
        )


SIZES = {
    "small": Size(
        decoder_layers=6,
        decoder_size=256,
        encoder_layers=4,
        encoder_size=128,
        micro_batch_size=4,
    ),
    "larger": Size(
        decoder_layers=8,
        decoder_size=512,
        encoder_layers=6,
        encoder_size=256,
        micro_batch_size=2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run measured; steps are those after the warm-up."""

    tokens_per_second: float
    startup_seconds: float  # from the command to the end of the first step
    peak_bytes: int = 0  # of the rank that has most
    # Of the command, nothing below is known.
    held_bytes: int = 0
    processor_seconds: float = 0.0  # of a step, all ranks
    losses: tuple[float, ...] = ()

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankNotes], *, began: float) -> "RunFigures":
        """Of what all ranks noted, the first of which is rank 0."""
        first, last = WARMUP - 1, len(ranks[0].ended) - 1
        assert last > first, "no step after the warm-up"
        seconds = ranks[0].ended[last] - ranks[0].ended[first]
        return cls(
            tokens_per_second=sum(ranks[0].tokens[WARMUP:]) / seconds,
            startup_seconds=ranks[0].ended[0] - began,
            processor_seconds=sum(each.processor[last] - each.processor[first] for each in ranks)
            / (last - first),
            peak_bytes=max(each.peak_bytes for each in ranks),
            held_bytes=max(each.held_bytes for each in ranks),
            losses=tuple(ranks[0].losses),
        )


def end_without_newline(template: Path) -> None:
    """Have a newline begin messages, not end them: behind an answer, TRL would train on it."""
    text, begin = template.read_text(), "'<|im_start|>' + message.role"
    assert begin in text, text
    text = text.replace("'<|im_end|>\\n'", "'<|im_end|>'")
    text = text.replace(begin, f"('' if loop.first else '\\n') + {begin}")
    template.write_text(text.replace("'<|im_start|>assistant", "'\\n<|im_start|>assistant"))


def in_order(rows: Sequence[str]) -> list[str]:
    """Rows as LoongPlug's first epoch takes them, for whoever takes them as they come."""
    return [rows[at] for at in epoch_permutation(len(rows), seed=SEED, epoch=0)]


def loss_apart(sides: Mapping[str, Sequence[RunFigures]]) -> float:
    """The most that the losses of a step differ between any two runs that know them."""
    steps = zip(*(run.losses for runs in sides.values() for run in runs if run.losses), strict=True)
    return max(max(losses) - min(losses) for losses in steps)


def beside(runs: Sequence[RunFigures], others: Sequence[RunFigures]) -> list[float]:
    """The rate over the other side's, round by round."""
    return [
        run.tokens_per_second / other.tokens_per_second
        for run, other in zip(runs, others, strict=True)
    ]


def table_of(name: str, sides: Mapping[str, Sequence[RunFigures]]) -> Table:
    """All sides of one size: medians of the rounds, with their range where it matters."""
    table = Table(
        *("side", "tokens/s", "x TRL", "processor s a step"),
        *("peak MiB", "held MiB", "start-up s"),
        title=f"{name}: {len(sides[TRL])} rounds in turn",
    )

    def middle(runs: Sequence[RunFigures], of: Callable[[RunFigures], float], form: str) -> str:
        found = median(map(of, runs))
        return f"{found:{form}}" if found else ""

    for side, runs in sides.items():
        table.add_row(
            side,
            spread([run.tokens_per_second for run in runs], form=",.0f"),
            "" if side == TRL else spread(beside(runs, sides[TRL]), form=".2f"),
            middle(runs, lambda run: run.processor_seconds, ".2f"),
            middle(runs, lambda run: run.peak_bytes / 2**20, ",.0f"),
            middle(runs, lambda run: run.held_bytes / 2**20, ",.0f"),
            middle(runs, lambda run: run.startup_seconds, ".1f"),
        )
    return table


class _Bench:
    """The runs of one size, whose data and weights lie in ``root``."""

    def __init__(self, root: Path, size: Size, *, steps: int) -> None:
        self._root, self._size, self._iterations = root, size, WARMUP + steps
        self._runs = 0
        write_levels_data(root, samples=self._iterations * size.rows_per_step)
        end_without_newline(root / "processor" / "chat_template.jinja")
        rows = (root / "train.jsonl").read_text().splitlines()
        (root / "in_order.jsonl").write_text("\n".join(in_order(rows)))
        weights = ("--lr", "0", "--min-lr", "0", "--train-iters", "1", "--save-hf", self._weights)
        self._ranks(1, ("loongplug", str(self._folder()), *self._flags(), *weights))

    def run(self, side: str) -> RunFigures:
        """One run of a side, by its name in the table."""
        if side in COMMANDS:
            return self._command(LAYOUTS[COMMANDS[side]])
        folder = self._folder()
        if side == TRL:
            settings = TrlSettings(
                weights=self._weights,
                processor=str(self._root / "processor"),
                rows=str(self._root / "in_order.jsonl"),
                micro_batch_size=self._size.micro_batch_size,
                accumulation=self._size.accumulation,
                steps=self._iterations,
            )
            words = ["trl", str(folder), json.dumps(asdict(settings))]
        else:
            loaded = ("--load-hf", self._weights)
            words = ["loongplug", str(folder), *self._flags(), *loaded, *LAYOUTS[side]]
        began = time.time()
        self._ranks(RANKS, words)
        notes = [
            RankNotes(**json.loads((folder / f"rank_{rank}.json").read_text()))
            for rank in range(RANKS)
        ]
        return RunFigures.of_ranks(notes, began=began)

    def _command(self, layout: Sequence[str]) -> RunFigures:
        """``loongplug train`` with the flags of the bare call; its first report is its warm-up."""
        metrics = self._folder() / "metrics.json"
        command = [sys.executable, "-c", "from loongplug.cli import app; app()", "train"]
        command += ["--ranks", str(RANKS), *self._flags(), "--load-hf", self._weights, *layout]
        began, startup, peak = time.time(), 0.0, 0.0
        with subprocess.Popen(
            [*command, "--metrics-json", str(metrics)],
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            for line in process.stdout or ():
                if (said := re.search(r"^iteration \d+/.* ([\d.]+) GiB", line)) is not None:
                    startup = startup or time.time() - began
                    peak = float(said[1]) * 2**30
        assert process.returncode == 0, "its message stands above"
        return RunFigures(
            tokens_per_second=json.loads(metrics.read_text())["tokens_per_second"],
            startup_seconds=startup,
            peak_bytes=round(peak),
        )

    @property
    def _weights(self) -> str:
        return str(self._root / "weights")

    def _folder(self) -> Path:
        self._runs += 1
        folder = self._root / f"run-{self._runs}"
        folder.mkdir()
        return folder

    def _flags(self) -> tuple[str, ...]:
        return (
            *("--model-name", "qwen3_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
            *("--tokenizer-model", str(self._root / "processor")),
            *("--train-data-path", str(self._root / "train.jsonl")),
            *("--seq-length", str(SEQ_LENGTH), "--seed", str(SEED)),
            *("--micro-batch-size", str(self._size.micro_batch_size)),
            *("--global-batch-size", str(self._size.rows_per_step)),
            *("--lr", str(LEARNING_RATE), "--lr-decay-style", "constant", "--weight-decay", "0.0"),
            *("--clip-grad", "1.0", "--adam-beta2", "0.999", "--lr-decay-iters", "1000000"),
            *("--train-iters", str(self._iterations), "--log-interval", "1"),
            *self._size.overrides,
        )

    def _ranks(self, ranks: int, words: Sequence[str]) -> None:
        """By torchrun, as TRL's users start theirs."""
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        script = str(Path(__file__).with_name("beside_ranks.py"))
        subprocess.run(
            [sys.executable, *launcher, script, *words],
            env=_environment(),
            stdout=subprocess.DEVNULL,
            check=True,
        )


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "CI": "1"}


def measure(
    root: Path, size: Size, *, sides: Sequence[str], rounds: int, steps: int
) -> dict[str, list[RunFigures]]:
    """Every side once in each round; who comes first in one comes last in the next."""
    bench = _Bench(root, size, steps=steps)
    found: dict[str, list[RunFigures]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            found[side].append(bench.run(side))
            print(f"round {number + 1}, {side}: {found[side][-1].tokens_per_second:,.0f} tokens/s")
    return found


def main(
    size: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(SIZES)}")] = None,
    side: Annotated[list[str] | None, typer.Option(help="all of them, without it")] = None,
    rounds: Annotated[int, typer.Option(help="how often each side takes its turn")] = 4,
    steps: Annotated[int, typer.Option(help="measured steps of a run")] = 12,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Measure LoongPlug's layouts, and its command line, beside TRL's SFTTrainer."""
    sides = side or [TRL, *LAYOUTS, *COMMANDS]
    written = {}
    for name in size or SIZES:
        with tempfile.TemporaryDirectory(prefix="loongplug-beside-") as folder:
            found = measure(Path(folder), SIZES[name], sides=sides, rounds=rounds, steps=steps)
        console = table_console()
        if TRL in found:
            console.print(table_of(name, found))
        for command, bare in COMMANDS.items():
            if command in found and bare in found:
                ratio = spread(beside(found[command], found[bare]), form=".3f")
                console.print(f"{command} over a bare call of run: {ratio}")
        apart = loss_apart(found)
        console.print(f"Losses are {apart:.1e} apart at most")
        written[name] = {side: [asdict(run) for run in runs] for side, runs in found.items()}
        if json_path is not None:
            json_path.write_text(json.dumps(written, indent=2) + "\n")
        if apart > LOSS_APART:
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
