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
        from loongplug.training.defaults import default_tokenizer
        from loongplug.training.flags import read_command_line, without_flags
        from loongplug.training.rules.rule import ranks_apart

        request, given = self._request, read_command_line(self._request.flags)
        args = given.args
        _require_comparable(args)
        flags = common_flags(request.flags, steps=request.steps, drop_sources=self._tiny)
        if not (args.model_name or args.config_file):  # the folder of its weights says what it is
            file = self._folder / "model.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            text = "# @package _global_\n" + compose_asked_for(args).to_yaml()
            file.write_text(text, encoding="utf-8")
            flags += ["--config-file", str(file)]
        if self._tiny and args.tokenizer_model is None and (args.data_path or args.train_data_path):
            default_tokenizer(args)  # of the folder, which itself is left aside
            flags += ["--tokenizer-model", args.tokenizer_model] if args.tokenizer_model else []
        flags += ["--device", self._device]
        if args.bf16:
            self._notes.append("fp32 instead of --bf16: rounding must not hide a difference")
        if args.rampup_batch_size is not None or args.step_batch_size_schedule is not None:
            self._notes.append("steps of one size instead of a batch size that grows")
        # What training asks for and parity does not depend on.
        for value, flag, default in (
            (args.training_phase, "--training-phase", "sft"),
            (args.micro_batch_size, "--micro-batch-size", "1"),
            (args.lr, "--lr", str(LEARNING_RATE)),
        ):
            flags += [flag, default] if value is None else []
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
        model = layout.model
        flags += [
            f"model.{model.keys[name]}.lora.dropout=0.0"
            for name, architecture in model.modules().items()
            if architecture.lora is not None
        ]
        sources = self._sources(layout)
        encoders = [model.keys[name] for name in model.encoders]
        batch = layout.args.global_batch_size
        reference = reference_flags(flags, global_batch_size=batch, encoders=encoders) + sources
        first_rank(reference, ranks=1, verified=True)
        return Plan(
            layout=(*flags, *sources),
            reference=tuple(reference),
            ranks=ranks,
            device=self._device,
            model=shown_name(args),
            notes=tuple(self._notes),
        )

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
            f"{value} layers of {key.partition('.')[0]}"
            for key, value in sizes.items()
            if not key.startswith("foundation.")
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
            ("--recompute-num-layers", args.recompute_num_layers and 1),
            (
                "--num-layers-per-virtual-pipeline-stage",
                args.num_layers_per_virtual_pipeline_stage
                and stages.layers // (layout.pp * layout.vpp),
            ),
        ):
            more += [flag, str(layers)] if layers else []
        return [*more, *overrides]

    def _ranks(self, args: Namespace, own: int) -> int:
        """As many ranks as were asked for, else the fewest; ``own`` are encoders' alone."""
        least = least_world(args)
        ranks = least + own if self._request.ranks is None else self._request.ranks
        if ranks <= own or (ranks - own) % least:
            more = f", and {own} more for encoders on ranks of their own" if own else ""
            raise ValueError(f"--ranks {ranks}: this layout takes a multiple of {least}{more}")
        return ranks

    def _batch(self, args: Namespace, ranks: int) -> list[str]:
        """The global batch; at a small scale, no more of it than fills the pipeline twice."""
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
        """Random weights and adapters, where the user gives none: fresh adapters are zero."""
        from loongplug.models.lora.mapping import adapter_table
        from loongplug.verify.weights import write_random_adapters, write_random_weights

        args, flags = layout.args, []
        hugging_face = layout.family.load_hugging_face(layout.model)
        table = adapter_table(layout.model, hugging_face)
        weights, adapters = self._folder / "weights", self._folder / "adapters"
        if not args.load_hf and not args.load:
            if not weights.is_dir():
                write_random_weights(weights, hugging_face, seed=SEED)
            flags += ["--load-hf", str(weights)]
        if table is not None and not args.load_lora and not args.load:
            if not adapters.is_dir():
                write_random_adapters(adapters, table, seed=SEED)
            flags += ["--load-lora", str(adapters)]
        return flags


def first_rank(flags: Sequence[str], *, ranks: int, **options: Any) -> "ParsedArguments":
    """The checked arguments of the first of so many ranks; as :func:`parse_arguments`."""
    from loongplug.training.arguments import parse_arguments

    before = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    try:
        return parse_arguments(flags, **options)
    finally:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        os.environ |= before


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
