"""A page of which modes go together, found by asking the rules, and of all rules.

``PYTHONPATH=tests python -m pages.compatibility [FILE]`` writes it, to runs/pages/compatibility.md
where no file is given.
"""

import copy
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loongplug.training.arguments import complete, validate_with_megatron
from loongplug.training.config import ComposedModel, compose_model
from loongplug.training.defaults import MEGATRON_TOKENIZER, apply_defaults
from loongplug.training.flags import CommandLine, read_command_line
from loongplug.training.rules import RULES, SUBJECTS, violations
from loongplug.training.rules.rule import data_parallel_size
from loongplug.training.step_sizes import settle_step_sizes
from pages.modes import DENSE, MODES, Mode

# Pair of modes -> names of the rules that refuse them together.
Matrix = Mapping[tuple[str, str], tuple[str, ...]]

PAGE = Path("runs/pages/compatibility.md")
_WORLD_SIZE = 8
_HEAD = """# Compatibility

Made by `PYTHONPATH=tests python -m pages.compatibility`, which asks the start-up rules
(`loongplug/training/rules/`) about each two modes in a run of 8 ranks. Beside the rules,
Megatron-Core's checks of its arguments hold.

In the matrix, a row and a column of the same name are the mode by itself. An empty cell means that
the two modes are of different models. A number names the rule that refuses, in the list below the
matrix; M: Megatron-Core's own checks do.
"""
MEGATRON = "Megatron-Core"
# A run that is valid but for its files, which no mode has to do with.
_RUN = (
    *("--training-phase", "sft", "--seq-length", "64", "--micro-batch-size", "1"),
    *("--global-batch-size", "16", "--lr", "1e-3", "--train-iters", "10", "--save", "run"),
)


class _Runs:
    """Runs of one mode or two. Each mode's flags are read once, and models are kept."""

    def __init__(self, modes: Iterable[Mode]) -> None:
        self._base = read_command_line(_RUN)
        self._lines = {mode.name: read_command_line((*_RUN, *mode.flags)) for mode in modes}
        self._models: dict[tuple[str, tuple[str, ...]], ComposedModel] = {}
        self._of_files = {rule.name for rule, _ in violations(*self._arguments(()))}

    def refused_by(self, *modes: Mode) -> tuple[str, ...]:
        """Names of the rules that refuse the modes together, or Megatron's where no rule does."""
        args, model = self._arguments(modes)
        found = (rule.name for rule, _ in violations(args, model))
        if names := tuple(name for name in found if name not in self._of_files):
            return names
        args = copy.deepcopy(args)  # Megatron changes what it checks
        args.tokenizer_type = MEGATRON_TOKENIZER
        settle_step_sizes(args, dp=data_parallel_size(args))
        try:
            validate_with_megatron(args)
        except ValueError:
            return (MEGATRON,)
        return ()

    def _arguments(self, modes: Sequence[Mode]) -> tuple[Namespace, Any]:
        lines = [self._base, *(self._lines[mode.name] for mode in modes)]
        args = copy.copy(self._base.args)
        for line in lines:
            for name in line.flags:
                setattr(args, name, getattr(line.args, name))
        complete(args, device="cpu")
        args.rank, args.world_size = 0, _WORLD_SIZE
        composed = self._model(modes, lines)
        for name, argument in composed.family.megatron_arguments(composed.config).items():
            setattr(args, name, argument.value)
        given = {name for line in lines for name in line.flags}
        apply_defaults(args, given=given, backend="gloo")
        return args, composed.config

    def _model(self, modes: Sequence[Mode], lines: Sequence[CommandLine]) -> ComposedModel:
        name = next((mode.model for mode in modes if mode.model), DENSE)
        overrides = tuple(sorted({override for line in lines for override in line.overrides}))
        if (name, overrides) not in self._models:
            self._models[name, overrides] = compose_model(model_name=name, overrides=overrides)
        return self._models[name, overrides]


def matrix(modes: Sequence[Mode] = MODES) -> Matrix:
    """What the rules say to each two modes, in either order, and to each alone (given twice).

    Two modes of different models have no entry. The CPU platform has to be active.
    """
    runs = _Runs(modes)
    cells = {}
    for index, one in enumerate(modes):
        for other in modes[index:]:
            if one.model and other.model and one.model != other.model:
                continue
            names = runs.refused_by(*dict.fromkeys((one, other)))
            cells[one.name, other.name] = cells[other.name, one.name] = names
    return cells


def markdown(cells: Matrix) -> str:
    """The page: the modes, the matrix ``cells`` with its notes and all rules."""
    modes = ((mode.name, mode.title, _flags(mode)) for mode in MODES)
    lines = [
        _HEAD,
        "## Modes\n",
        *_table(("mode", "what it is", "asked for by, here"), modes),
        "\n## Which go together\n",
        *_matrix_lines(cells),
        "\n## All rules",
        *_rule_lines(),
    ]
    return "\n".join([*lines, ""])


def _matrix_lines(cells: Matrix) -> Iterator[str]:
    """The matrix, and below it a numbered note for each rule that it mentions."""
    mentioned = {name for names in cells.values() for name in names}
    rules = [rule for rule in RULES if rule.name in mentioned]
    numbers = {rule.name: f"{number}" for number, rule in enumerate(rules, start=1)}
    numbers[MEGATRON] = "M"

    def cell(one: Mode, other: Mode) -> str:
        names = cells.get((one.name, other.name))
        if names is None:
            return ""
        return f"no ({', '.join(numbers[name] for name in names)})" if names else "yes"

    rows = ((f"**{one.name}**", *(cell(one, other) for other in MODES)) for one in MODES)
    yield from _table(("", *(mode.name for mode in MODES)), rows)
    yield ""
    for rule in rules:
        yield f"{numbers[rule.name]}. **{rule.name}**: {rule.reason}. Instead: {rule.cure}."


def _rule_lines() -> Iterator[str]:
    for subject, rules in SUBJECTS.items():
        yield f"\n### {subject}\n"
        yield from _table(
            ("rule", "refused", "why", "what to do"),
            ((rule.name, rule.refuses, rule.reason, rule.cure) for rule in rules),
        )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(row)} |"


def _flags(mode: Mode) -> str:
    return f"`{shlex.join(mode.flags or ('--model-name', str(mode.model)))}`"


def main(arguments: Sequence[str]) -> None:
    """Write the page to the file that is given, or to its usual place."""
    from loongplug.platform import activate

    platform = activate("cpu")
    from loongplug.platform.upstream import apply_upstream_replacements

    apply_upstream_replacements(platform)
    file = Path(arguments[0]) if arguments else PAGE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(markdown(matrix()), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
