"""One training run: from a command line to a trained, saved and exported model."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.global_vars import get_tensorboard_writer, set_global_variables

from loongplug.checkpoint.adapter_files import check_adapter_export, save_adapters
from loongplug.checkpoint.adapter_weights import merged_weights
from loongplug.checkpoint.hf_export import check_hf_export, save_hf_folder
from loongplug.data.microbatch import Microbatch
from loongplug.hetero.engine import Engine
from loongplug.models.hf_mapping import Mapping
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.observe.tracing import traced
from loongplug.parallel.module_ddp import ModuleDataParallel
from loongplug.parallel.optimizer_per_module import optimizer_per_module
from loongplug.parallel.states import PARALLEL_STATES, destroy_parallel_states
from loongplug.platform import current_platform
from loongplug.platform.upstream_seams import (
    per_module_data_parallel_table,
    rates_table,
    setup_table,
    stepped_schedules_table,
)
from loongplug.training.arguments import parse_arguments
from loongplug.training.checkpoints import (
    check_checkpoint_folders,
    has_checkpoint,
    use_whole_checkpoints,
)
from loongplug.training.datasets import DatasetProvider
from loongplug.training.forward_step import ForwardStep, LossReport
from loongplug.training.freezing import freezing_of
from loongplug.training.log import LogTap, megatron_output
from loongplug.training.progress import (
    StepReport,
    TrainingProgress,
    leave_metrics,
    progress_sink,
    summarize,
)
from loongplug.training.provider import (
    ModelProvider,
    backend_of,
    engine_of,
    tensor_offload_of,
)
from loongplug.training.rates import rates_of
from loongplug.training.step_sizes import StepSizes, step_sizes


class Watch(Protocol):
    """What looks on while a run trains. Each method is called on every rank that has its news."""

    def built(self, chunks: Sequence[Any], optimizer: Any, *, mapping: Mapping) -> None:
        """The wrapped model chunks, their weights loaded, and the optimizer, on every rank."""

    def loss(self, microbatch: Microbatch, report: LossReport) -> None:
        """A microbatch and its loss, in order, on the ranks that make losses."""


def run(
    argv: Sequence[str],
    *,
    on_report: Callable[[StepReport], None] | None = None,
    watch: Watch | None = None,
    verified: bool = False,
) -> list[StepReport]:
    """Train as ``argv`` says; gives the reports of the run. Every rank enters.

    ``on_report`` is called with each report, on every rank. A run that is ``verified`` against
    another may be in fp32 where others may not.
    """
    parsed = parse_arguments(argv, verified=verified)
    args = parsed.args
    platform = current_platform()
    platform.use(
        per_module_data_parallel_table(wrapper=ModuleDataParallel, optimizer=optimizer_per_module)
    )
    use_whole_checkpoints(platform, asynchronous=args.async_save)
    engine = engine_of(args, parsed.model)
    if engine.steps:
        platform.use(stepped_schedules_table(engine.schedules))
    datasets = DatasetProvider(args, parsed.model, engine=engine)
    check_checkpoint_folders(args, parsed.model_yaml, data=datasets.fingerprint)
    hugging_face = parsed.family.load_hugging_face(parsed.model)
    if args.save_hf:
        check_hf_export(
            Path(args.save_hf), model=hugging_face, processor_folder=Path(args.tokenizer_model)
        )
    table = adapter_table(parsed.model, hugging_face)
    if args.save_lora:
        check_adapter_export(Path(args.save_lora), model=hugging_face)
    from_folders = not has_checkpoint(args)
    provider = ModelProvider(
        parsed.model,
        parsed.family,
        engine=engine,
        backend=backend_of(args),
        freezing=freezing_of(args, parsed.model),
        hf_folder=Path(args.load_hf) if args.load_hf and from_folders else None,
        adapter_folder=Path(args.load_lora) if args.load_lora and from_folders else None,
        offload=tensor_offload_of(args, platform=platform),
        seed=args.seed,
    )
    forward_step = ForwardStep(platform, on_loss=None if watch is None else watch.loss)
    with (
        traced(
            args.trace, platform=platform, rank=args.rank, world_size=args.world_size
        ) as recorder,
        _reported(engine, recorder),
        megatron_output(args) as terminal,
        _told_what_was_built(engine, watch, mapping=with_adapters(hugging_face.mapping, table)),
        _rated(step_sizes(args)),
    ):
        set_global_variables(args)
        reports = _pretrain(
            args,
            datasets,
            provider,
            forward_step=forward_step,
            terminal=terminal,
            on_report=on_report,
        )
        datasets.close()
        if args.save_hf:
            save_hf_folder(
                provider.chunks,
                Path(args.save_hf),
                model=hugging_face,
                processor_folder=Path(args.tokenizer_model),
                weight_of=merged_weights(provider.chunks),
            )
        if args.save_lora:
            assert table is not None
            save_adapters(provider.chunks, Path(args.save_lora), table=table, base=args.load_hf)
    return reports


def _pretrain(
    args: Namespace,
    datasets: DatasetProvider,
    provider: ModelProvider,
    *,
    forward_step: ForwardStep,
    terminal: TextIO,
    on_report: Callable[[StepReport], None] | None,
) -> list[StepReport]:
    """Megatron's own loop, with our progress beside it."""
    from megatron.training.training import pretrain

    with LogTap(
        lambda: TrainingProgress(
            total=args.train_iters,
            interval=args.log_interval,
            device=current_platform().device,
            counter=forward_step,
            counts_tokens=_speaks_for_replica(),
            has_loss=_speaks_for_loss(),
            sink=progress_sink(terminal, total=args.train_iters) if args.rank == 0 else None,
            on_report=_also_in_tensorboard(on_report),
            bad_samples=datasets.bad_samples.counts,
        )
    ) as tap:
        try:
            pretrain(
                pretrain_cfg_container_from_args(args),
                datasets,
                ModelType.encoder_or_decoder,
                forward_step,
                provider,
            )
        finally:  # a run that SIGTERM ends leaves by SystemExit
            if tap.reports and args.metrics_json and args.rank == 0:
                leave_metrics(
                    Path(args.metrics_json),
                    summarize(tap.reports, valid_loss=tap.valid_loss, bad_samples=tap.bad_samples),
                    name=args.metrics_name,
                )
    return tap.reports


@contextmanager
def _told_what_was_built(
    engine: Engine, watch: Watch | None, *, mapping: Mapping
) -> Iterator[None]:
    """``engine``, and ``watch`` behind it, get chunks and optimizer before the first step."""

    def built(chunks: list[Any], optimizer: Any) -> None:
        engine.built(chunks, optimizer)
        if watch is not None:
            watch.built(chunks, optimizer, mapping=mapping)

    table = setup_table(built)
    table.apply()
    try:
        yield
    finally:
        table.undo()


@contextmanager
def _rated(sizes: StepSizes | None) -> Iterator[None]:
    """Count the learning rate's course by steps of these sizes."""
    if sizes is None or not sizes.vary:
        yield
        return
    table = rates_table(rates_of(sizes))
    table.apply()
    try:
        yield
    finally:
        table.undo()


@contextmanager
def _reported(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """Report exchanges of features and switches between parallel states to ``recorder``."""
    engine.recorder = recorder
    if recorder is not NOTHING:
        PARALLEL_STATES.on_switch = lambda before, now: recorder.mark("switch", now, before=before)
    try:
        yield
    finally:
        PARALLEL_STATES.on_switch = None
        destroy_parallel_states()  # a process may run again


def _also_in_tensorboard(
    on_report: Callable[[StepReport], None] | None,
) -> Callable[[StepReport], None]:
    """Write what Megatron does not know of a step beside its own scalars."""

    def noted(step: StepReport) -> None:
        writer = get_tensorboard_writer()  # one rank has it
        if writer is not None:
            writer.add_scalar("fill rate", step.fill_rate, step.iteration)
        if on_report is not None:
            on_report(step)

    return noted


def _speaks_for_replica() -> bool:
    """One rank per data parallel replica: its first stage's first tensor parallel rank."""
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def _speaks_for_loss() -> bool:
    """One rank of all: the losses of the last stage are reduced over the replicas already."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank() == 0
    )
