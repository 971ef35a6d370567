"""A page of which modes go together, found by asking the rules, and of all rules.

``PYTHONPATH=tests python -m pages.compatibility [FILE]`` writes it, to runs/pages/compatibility.md
where no file is given.
"""

import copy
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loongplug.training.arguments import complete, validate_with_megatron
from loongplug.training.config import ComposedModel, compose_model
from loongplug.training.defaults import MEGATRON_TOKENIZER, apply_defaults
from loongplug.training.flags import read_command_line
from loongplug.training.rules import RULES, SUBJECTS, violations
from loongplug.training.rules.rule import data_parallel_size
from loongplug.training.step_sizes import settle_step_sizes

DENSE = "qwen3_vl_tiny"
EXPERTS = "qwen3_vl_moe_tiny"


@dataclass(frozen=True)
class Mode:
    """One row and column of the matrix; ``text`` has flags and overrides of a run of 8 ranks.

    Two modes of different models do not meet, and their cell stays empty.
    """

    name: str
    title: str
    text: str = ""
    model: str | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags and overrides, one by one."""
        return tuple(shlex.split(self.text))


_TP = "--tensor-model-parallel-size 2"
_SP = f"{_TP} --sequence-parallel"
_PP = "--pipeline-model-parallel-size 2"
_EP = "--expert-model-parallel-size 2"
_FULL = "--enable-full-hetero-dp"
_OFFLOADS = "--full-hetero-dp-cpu-offload --offload-encoder-activations --offload-encoder-state"
_DISTRIBUTED = "--use-distributed-optimizer"
_RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "model.image_encoder.recompute=true"
)
_SAMPLE_BALANCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"
_FROZEN = "model.image_encoder.freeze=true"
_FROZEN_VISION = f"{_FROZEN} model.image_projector.freeze=true"
_LORA = "model.image_encoder.lora.rank=8 model.foundation.lora.rank=8"

MODES: tuple[Mode, ...] = (
    Mode("Qwen3-VL", "the dense family", model=DENSE),
    Mode("MoE", "Qwen3-VL-MoE", model=EXPERTS),
    Mode("Qwen2.5-VL", "the family with window attention", model="qwen2_5_vl_tiny"),
    Mode("TP", "tensor parallelism alone", _TP),
    Mode("SP", "with sequence parallelism", _SP),
    Mode("PP", "pipeline parallelism", _PP),
    Mode("VPP", "virtual stages", f"{_PP} --num-virtual-stages-per-pipeline-rank 2"),
    Mode("CP", "context parallelism", "--context-parallel-size 2"),
    Mode("EP", "expert parallelism", _EP, EXPERTS),
    Mode("ETP", "experts' tensor parallelism", "--expert-tensor-parallel-size 2", EXPERTS),
    Mode(
        "MoE overlap",
        "experts' exchange beside the computation of another microbatch",
        f"--overlap-moe-expert-parallel-comm --bf16 {_EP}",
        EXPERTS,
    ),
    Mode(
        "hetero TP",
        "the encoder's own tensor parallel size",
        f"{_SP} model.image_encoder.tensor_model_parallel_size=1",
    ),
    Mode(
        "hetero DP",
        "each unit is encoded by one rank of the group",
        f"{_SP} --enable-encoder-hetero-dp",
    ),
    Mode("full hetero", "full separation of encoder and decoder", f"{_SP} {_FULL}"),
    Mode(
        "streamed",
        "full separation, encoders in the pipeline's bubbles",
        f"{_PP} {_FULL} --full-hetero-dp-schedule streamed",
    ),
    Mode(
        "offload",
        "full separation, the encoder's side in host memory while the decoder works",
        f"{_SP} {_FULL} {_OFFLOADS}",
    ),
    Mode("dist. optimizer", "optimizer state split over data parallel ranks", _DISTRIBUTED),
    Mode(
        "overlap",
        "gradients and parameters travel during computation",
        f"{_DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
    ),
    Mode("recompute", "activations are computed again", _RECOMPUTE),
    Mode("frozen", "a frozen encoder", _FROZEN),
    Mode("frozen vision", "a frozen encoder and projector", _FROZEN_VISION),
    Mode("frozen decoder", "a frozen text decoder", "model.foundation.freeze=true"),
    Mode(
        "frozen by name",
        "parameters that patterns freeze, but for those that others name",
        "--freeze-parameters '*' --train-parameters '*norm*'",
    ),
    Mode("adapters", "LoRA on encoder and decoder", _LORA),
    Mode("ramp-up", "a batch size that grows", "--rampup-batch-size 8 8 64"),
    Mode("packing", "several samples to a sequence", "--packing"),
    Mode("sample balance", "experts balanced sample by sample", _SAMPLE_BALANCE, EXPERTS),
    Mode("bf16", "weights in bf16, gradients in fp32", "--bf16"),
    Mode("async save", "checkpoints written beside the run", "--async-save"),
)

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


_line = cache(read_command_line)


@cache
def _composed(name: str, overrides: tuple[str, ...]) -> ComposedModel:
    return compose_model(model_name=name, overrides=overrides)


def _refused_by(*modes: Mode) -> tuple[str, ...]:
    """Names of the rules that refuse the modes together, or Megatron's where no rule does."""
    args, model = _arguments(modes)
    found = (rule.name for rule, _ in violations(args, model))
    if names := tuple(name for name in found if name not in _of_files()):
        return names
    args = copy.deepcopy(args)  # Megatron changes what it checks
    args.tokenizer_type = MEGATRON_TOKENIZER
    settle_step_sizes(args, dp=data_parallel_size(args))
    try:
        validate_with_megatron(args)
    except ValueError:
        return (MEGATRON,)
    return ()


@cache
def _of_files() -> set[str]:
    return {rule.name for rule, _ in violations(*_arguments(()))}


def _arguments(modes: Sequence[Mode]) -> tuple[Namespace, Any]:
    lines = [_line(_RUN), *(_line((*_RUN, *mode.flags)) for mode in modes)]
    args = copy.copy(lines[0].args)
    for line in lines:
        for name in line.flags:
            setattr(args, name, getattr(line.args, name))
    complete(args, device="cpu")
    args.rank, args.world_size = 0, _WORLD_SIZE
    model = next((mode.model for mode in modes if mode.model), DENSE)
    overrides = {override for line in lines for override in line.overrides}
    composed = _composed(model, tuple(sorted(overrides)))
    for name, argument in composed.family.megatron_arguments(composed.config).items():
        setattr(args, name, argument.value)
    apply_defaults(args, given={name for line in lines for name in line.flags}, backend="gloo")
    return args, composed.config


def matrix(modes: Sequence[Mode] = MODES) -> Matrix:
    """What the rules say to each two modes, in either order, and to each alone (given twice).

    Two modes of different models have no entry. The CPU platform has to be active.
    """
    cells = {}
    for index, one in enumerate(modes):
        for other in modes[index:]:
            if one.model and other.model and one.model != other.model:
                continue
            names = _refused_by(*dict.fromkeys((one, other)))
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
