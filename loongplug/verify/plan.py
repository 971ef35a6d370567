"""From the user's command line to the two runs."""

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loongplug.verify.flags import common_flags, reference_flags
from loongplug.verify.tiny_rows import write_rows
from loongplug.verify.tiny_sizes import (
    TinyLayout,
    as_overrides,
    longest_row,
    media_of,
    tiny_sizes,
    tiny_stages,
    up,
    write_processor_of,
)

if TYPE_CHECKING:
    from loongplug.training.arguments import ParsedArguments

SCALES = ("tiny",)
SEED = 1234
# Rounding moves parameters apart in steps of the rate (see docs/verify.md): a small one.
LEARNING_RATE = 1e-4
SAMPLES = 64  # of tiny rows
_MICROBATCHES = 4  # of a replica, at least: gradients of few tokens are mostly rounding
_DATA = frozenset(("data_path", "train_data_path", "media_root", "seq_length"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Two runs to compare; ``notes`` say where they are other than the user's flags."""

    layout: tuple[str, ...]
    reference: tuple[str, ...]
    ranks: int
    device: str
    model: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for: training's flags, and the options of the command."""

    flags: tuple[str, ...]
    scale: str | None = None
    steps: int = 3
    ranks: int | None = None


def make_plan(request: Request, *, folder: Path) -> Plan:
    """Check the flags for both runs, and make in ``folder`` what they lack: data, weights.

    Imports Megatron and leaves its traces in the process; no collectives.

    Raises:
        ValueError: the flags, or the options, cannot be used.
    """
    if request.scale not in (None, *SCALES):
        raise ValueError(f"--scale is {request.scale!r}: expected {' or '.join(SCALES)}")
    if request.steps < 1:
        raise ValueError(f"--steps is {request.steps}: expected 1 or more")
    from loongplug.platform import activate, requested_device

    device = activate(requested_device(request.flags)).name
    return _Planner(request, folder=folder, device=device).plan()


class _Planner:
    def __init__(self, request: Request, *, folder: Path, device: str) -> None:
        self._request = request
        self._folder = folder
        self._device = device
        self._tiny = request.scale == "tiny"
        self._notes: list[str] = []

    def plan(self) -> Plan:
        from loongplug.training.config import compose_asked_for, shown_name
        from loongplug.training.flags import read_command_line, without_flags
        from loongplug.training.rules.rule import ranks_apart

        given = read_command_line(self._request.flags)
        args = given.args
        _require_comparable(args)
        named = self._named_model(args)
        flags = common_flags(
            self._request.flags, steps=self._request.steps, drop_sources=self._tiny
        )
        flags += named
        if self._tiny and (args.data_path or args.train_data_path):
            flags += _folders_tokenizer(args)  # the folder itself is left aside
        flags += ["--device", self._device]
        if args.bf16:
            self._notes.append("fp32 instead of --bf16: rounding must not hide a difference")
        if args.rampup_batch_size is not None or args.step_batch_size_schedule is not None:
            self._notes.append("steps of one size instead of a batch size that grows")
        flags += self._required(args)
        if self._tiny and args.tokenizer_model is None:
            flags = without_flags(flags, _DATA) + self._tiny_data(args)
        elif args.seq_length is None:
            flags += ["--seq-length", "1024"]
        if self._tiny:
            flags += self._tiny_model(args, flags)
        elif args.load:
            flags += ["--finetune", "--no-load-optim", "--no-load-rng"]
        own = ranks_apart(compose_asked_for(args, overrides=given.overrides).config)
        ranks = self._ranks(args, own)
        flags += self._batch(args, ranks - own)
        layout = first_rank(flags, ranks=ranks, verified=True)
        flags += _without_dropout(layout.model)
        batch = layout.args.global_batch_size
        model = layout.model
        reference = reference_flags(
            flags,
            global_batch_size=batch,
            encoders=[model.keys[name] for name in model.encoders],
        )
        sources = self._sources(layout)
        reference += sources
        first_rank(reference, ranks=1, verified=True)
        return Plan(
            layout=(*flags, *sources),
            reference=tuple(reference),
            ranks=ranks,
            device=self._device,
            model=shown_name(args),
            notes=tuple(self._notes),
        )

    def _named_model(self, args: Namespace) -> list[str]:
        """A file with the model, where only the folder of its weights says what it is."""
        from loongplug.training.config import compose_asked_for

        if args.model_name or args.config_file:
            return []
        composed = compose_asked_for(args)
        file = self._folder / "model.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# @package _global_\n" + composed.to_yaml(), encoding="utf-8")
        return ["--config-file", str(file)]

    def _required(self, args: Namespace) -> list[str]:
        """What training asks for and parity does not depend on."""
        flags = []
        if args.training_phase is None:
            flags += ["--training-phase", "sft"]
        if args.micro_batch_size is None:
            flags += ["--micro-batch-size", "1"]
        if args.lr is None:
            flags += ["--lr", str(LEARNING_RATE)]
        return flags

    def _tiny_data(self, args: Namespace) -> list[str]:
        """Rows and a tokenizer of our own, where the user names no tokenizer."""
        from loongplug.training.config import compose_asked_for

        data = self._folder / "data"
        model = compose_asked_for(args).config
        if not (data / "train.jsonl").is_file():
            write_rows(data, samples=SAMPLES, media=media_of(model))
        write_processor_of(model, data / "processor")
        self._notes.append("tiny rows and tokenizer: no --tokenizer-model was given")
        tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
        length = up(longest_row(model), tp if cp == 1 else lcm(2, tp) * cp)
        return [
            *("--tokenizer-model", str(data / "processor")),
            *("--train-data-path", str(data / "train.jsonl"), "--seq-length", str(length)),
        ]

    def _tiny_model(self, args: Namespace, flags: Sequence[str]) -> list[str]:
        """Overrides that make the model its small likeness."""
        from loongplug.training.config import compose_asked_for, lora_overrides
        from loongplug.training.flags import read_command_line
        from loongplug.training.special_tokens import read_tokenizer

        line = read_command_line(flags)
        composed = compose_asked_for(args, overrides=line.overrides)
        model, own = composed.config, args.tokenizer_model is None
        layout = _layout(args, model)
        stages = tiny_stages(layout, taps=model.taps())
        tokenizer = read_tokenizer(Path(line.args.tokenizer_model))
        sizes = tiny_sizes(model, layout, vocabulary=tokenizer.size, tiny_media=own)
        adapters = {name: each.lora for name, each in model.modules().items()}
        overrides = [*as_overrides(sizes), *lora_overrides(model.keys, adapters)]
        overrides += [f"model.{name}=null" for name in composed.family.special_tokens]
        depths = [
            f"{value} layers of {model.keys[name]}"
            for name in model.encoders
            for key, value in sizes.items()
            if key.startswith(f"{model.keys[name]}.")
            and key.endswith(("num_layers", "num_hidden_layers"))
        ]
        self._notes.append(
            f"--scale tiny: {stages.layers} decoder layers of {sizes['foundation.hidden_size']} "
            f"channels, {', '.join(depths)}, random weights"
        )
        more: list[str] = []
        for flag, layers in (
            ("--decoder-first-pipeline-num-layers", stages.first),
            ("--decoder-last-pipeline-num-layers", stages.last),
        ):
            more += [] if layers is None else [flag, str(layers)]
        if args.recompute_num_layers:
            more += ["--recompute-num-layers", "1"]
        if args.num_layers_per_virtual_pipeline_stage:
            per_stage = stages.layers // (layout.pp * layout.vpp)
            more += ["--num-layers-per-virtual-pipeline-stage", str(per_stage)]
        return [*more, *overrides]

    def _ranks(self, args: Namespace, own: int) -> int:
        """As many ranks as were asked for, else the fewest that the sizes ask for.

        ``own`` are the ranks of encoders that the decoder has not.
        """
        least = least_world(args)
        ranks = least + own if self._request.ranks is None else self._request.ranks
        if ranks <= own or (ranks - own) % least:
            more = f", and {own} more for encoders on ranks of their own" if own else ""
            raise ValueError(f"--ranks {ranks}: this layout takes a multiple of {least}{more}")
        return ranks

    def _batch(self, args: Namespace, ranks: int) -> list[str]:
        """The global batch, for so many ``ranks`` of the decoder.

        At a small scale, no more of it than fills the pipeline twice.
        """
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        replicas = max(1, ranks // (tp * pp * args.context_parallel_size))
        each = args.micro_batch_size or 1
        enough = up(max(_MICROBATCHES, 2 * pp), lcm(pp, tp))
        given = (args.global_batch_size or 0) // (each * replicas)
        if given and (not self._tiny or given <= enough):
            return []
        if given:
            self._notes.append(
                f"{enough} microbatches a replica instead of {given}: enough to fill the "
                "pipeline twice"
            )
        return ["--global-batch-size", str(enough * each * replicas)]

    def _sources(self, layout: "ParsedArguments") -> list[str]:
        """Random weights and adapters, where the user gives none.

        Adapters of a fresh start are zero, and hide half of their gradients.
        """
        from loongplug.models.lora.mapping import adapter_table
        from loongplug.verify.weights import write_random_adapters, write_random_weights

        args, flags = layout.args, []
        hugging_face = layout.family.load_hugging_face(layout.model)
        if not args.load_hf and not args.load:
            folder = self._folder / "weights"
            if not folder.is_dir():
                write_random_weights(folder, hugging_face, seed=SEED)
            flags += ["--load-hf", str(folder)]
        table = adapter_table(layout.model, hugging_face)
        if table is not None and not args.load_lora and not args.load:
            folder = self._folder / "adapters"
            if not folder.is_dir():
                write_random_adapters(folder, table, seed=SEED)
            flags += ["--load-lora", str(folder)]
        return flags


def first_rank(flags: Sequence[str], *, ranks: int, **options: Any) -> "ParsedArguments":
    """The checked arguments of the first of so many ranks; as :func:`parse_arguments`."""
    from loongplug.training.arguments import parse_arguments

    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    try:
        return parse_arguments(flags, **options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _folders_tokenizer(args: Namespace) -> list[str]:
    """The tokenizer of ``--load-hf``, where none is named."""
    from loongplug.training.defaults import default_tokenizer

    if args.tokenizer_model is not None:
        return []
    default_tokenizer(args)
    return [] if args.tokenizer_model is None else ["--tokenizer-model", args.tokenizer_model]


def _without_dropout(model: Any) -> list[str]:
    """Overrides that leave adapters' inputs whole, as the flags do with all others."""
    return [
        f"model.{model.keys[name]}.lora.dropout=0.0"
        for name, architecture in model.modules().items()
        if architecture.lora is not None
    ]


def least_world(args: Namespace) -> int:
    """The fewest ranks that hold whole replicas of the model and of its experts."""
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    pp: int = args.pipeline_model_parallel_size
    return pp * lcm(dense, args.expert_model_parallel_size * etp)


def _layout(args: Namespace, model: Any) -> TinyLayout:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    vpp = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        vpp = model.foundation.num_layers // (pp * args.num_layers_per_virtual_pipeline_stage)
    return TinyLayout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or tp,
        encoder_tp=lcm(
            *(model.encoder(name).tensor_model_parallel_size or tp for name in model.encoders)
        ),
        first=args.decoder_first_pipeline_num_layers is not None,
        last=args.decoder_last_pipeline_num_layers is not None,
    )


def _require_comparable(args: Namespace) -> None:
    """Refuse what no layout computes alike, or what is not measured here."""
    if args.optimizer != "adam":
        raise ValueError(f"--optimizer {args.optimizer}: only adam's state is compared")
    types = args.moe_router_load_balancing_type
    if "global_aux_loss" in ([types] if isinstance(types, str) else types or ()):
        raise ValueError(
            "--moe-router-load-balancing-type global_aux_loss counts over the microbatches that "
            "run at one time, so that it is another loss with every other number of replicas; "
            "verify with aux_loss"
        )
