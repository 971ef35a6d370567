"""Megatron's own training loop, with our progress beside it, and the figures that it leaves."""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from torch import Tensor

from loongplug.checkpoint.common_errors import write_error
from loongplug.hetero.engine import Engine
from loongplug.output_files import write_figures
from loongplug.platform import current_platform
from loongplug.platform.machine import peak_tflops
from loongplug.platform.upstream_seams import training_log_table
from loongplug.training.answers import Answers
from loongplug.training.datasets import DatasetProvider
from loongplug.training.forward_step import ForwardStep
from loongplug.training.log import applied
from loongplug.training.progress import Display, StepReport, TrainingProgress, summarize
from loongplug.training.provider import ModelProvider
from loongplug.training.rank_data import first_of_stage, speaks_for_replica


def train(
    args: Namespace,
    datasets: DatasetProvider,
    provider: ModelProvider,
    *,
    engine: Engine,
    forward_step: ForwardStep,
    answers: Answers | None,
    terminal: TextIO,
    on_report: Callable[[StepReport], None] | None,
    on_validation: Callable[[int, float], None] | None,
) -> tuple[list[StepReport], ValueError | None]:
    """The reports of a run, and what is wrong with the metrics' file."""
    from megatron.training.training import pretrain

    def logged(scalars: dict[str, float], iteration: int) -> None:
        writer = get_tensorboard_writer()  # one rank has it
        if writer is not None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        wandb = get_wandb_writer()  # the same rank's
        if wandb is not None:
            wandb.log(scalars, iteration)

    def noted(step: StepReport) -> None:
        logged(step.scalars(), step.iteration)
        if on_report is not None:
            on_report(step)

    progress: TrainingProgress | None = None

    def stepped(iteration: int, losses: dict[str, Tensor], **known: Any) -> None:
        nonlocal progress
        if progress is None:  # the parallel state is there to ask
            platform = current_platform()
            on_gpu = platform.device.type == "cuda"
            progress = TrainingProgress(
                total=args.train_iters,
                interval=args.log_interval,
                device=platform.device,
                counter=forward_step,
                counts_tokens=engine.decodes and speaks_for_replica(),
                has_loss=engine.decodes and _speaks_for_loss(),
                sink=Display(terminal, total=args.train_iters) if args.rank == 0 else None,
                on_report=noted,
                met=datasets.bad_samples.counts,
                news=datasets.bad_samples.remarks.news,
                memory=platform.peak_memory_bytes,
                peak_tflops=peak_tflops(torch.cuda.get_device_name()) if on_gpu else None,
            )
        progress.step(iteration, losses.get("lm loss"), **known)

    def evaluated(losses: dict[str, Tensor]) -> None:
        if progress is None:
            return
        answered = None if answers is None else answers.scored()
        progress.evaluated(losses.get("lm loss"), answered=answered)
        if (match := progress.valid_exact_match) is not None:
            logged({"exact match validation": match}, progress.iteration)
        if on_validation is not None and progress.valid_loss is not None:
            on_validation(progress.iteration, progress.valid_loss)

    table = training_log_table(stepped, on_evaluation=evaluated, interval=args.log_interval)
    with applied(table):
        try:
            pretrain(
                pretrain_cfg_container_from_args(args),
                datasets,
                ModelType.encoder_or_decoder,
                forward_step,
                provider,
            )
        finally:  # a run that SIGTERM ends leaves by SystemExit
            unwritten = _leave_metrics(args, progress)
            if unwritten is not None and sys.exception() is not None:
                print(f"loongplug: {unwritten}", file=sys.stderr, flush=True)
            if progress is not None:
                progress.close()
    return progress.reports if progress is not None else [], unwritten


def _leave_metrics(args: Namespace, progress: TrainingProgress | None) -> ValueError | None:
    """Write ``--metrics-json``; an error comes back, for when the model has been exported."""
    if progress is None or not progress.reports or not args.metrics_json or args.rank != 0:
        return None
    figures = summarize(
        progress.reports,
        valid_loss=progress.valid_loss,
        valid_exact_match=progress.valid_exact_match,
        bad_samples=progress.bad_samples,
        empty_steps=progress.counter.empty_steps,
    )
    name = args.metrics_name
    try:
        write_figures(
            Path(args.metrics_json),
            figures if name is None else {name: figures},
            "metrics",
            beside=name is not None,
        )
    except OSError as error:
        return write_error(f"--metrics-json {args.metrics_json}", error)
    except ValueError as error:
        return error
    return None


def _speaks_for_loss() -> bool:
    """Whether this one rank tells the loss of a step, which is reduced over replicas already."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and first_of_stage()
        and parallel_state.get_data_parallel_rank() == 0
    )
