"""One training run: from a command line to a trained, saved and exported model."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron.training.global_vars import set_global_variables

from loongplug.checkpoint.common_errors import of_all_ranks, raise_together
from loongplug.checkpoint.retention import CheckpointRetention
from loongplug.checkpoint.save_lock import LOCK_FILE
from loongplug.checkpoint.settings_notes import CARRIED_FOLDER
from loongplug.data.bad_samples import Remarks
from loongplug.data.microbatch import Microbatch
from loongplug.hetero.engine import Engine
from loongplug.models.amounts import ModelAmounts
from loongplug.models.hf_mapping import Mapping
from loongplug.models.lora.mapping import adapter_table, with_adapters
from loongplug.observe.recorder import NOTHING, Recorder
from loongplug.observe.tracing import traced
from loongplug.parallel.exit_notes import saves_when_told
from loongplug.parallel.failure import AtEnd, nothing_at_end
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
from loongplug.training import checkpoints
from loongplug.training.answers import Answers
from loongplug.training.arguments import ParsedArguments, parse_arguments, validate_optimizer
from loongplug.training.datasets import DatasetProvider
from loongplug.training.exports import Exports
from loongplug.training.forward_step import ForwardStep, LossReport, StepRows
from loongplug.training.freezing import freezing_of, trained_modules
from loongplug.training.log import WithoutSave, applied, log_folder, megatron_output
from loongplug.training.loop import train
from loongplug.training.outputs import outputs_ready
from loongplug.training.own_ranks import finalized_together, make_own_groups
from loongplug.training.progress import StepReport
from loongplug.training.provider import ModelProvider, backend_of, engine_of, tensor_offload_of
from loongplug.training.rank_data import row_lengths_of
from loongplug.training.special_tokens import folder_differences
from loongplug.training.start_agreement import (
    require_same_data,
    require_same_start,
    require_same_weights,
)
from loongplug.training.step_check import StepCheck, finalized
from loongplug.training.step_sizes import rates_of, step_sizes
from loongplug.training.summary import end_facts, print_facts, start_facts

_WITHOUT_MEDIA = "{} trains, but has no media: weight decay alone moves it. Freeze it."


class Watch(Protocol):
    """What looks on while a run trains. ``built``: all ranks; ``loss``: last stage only."""

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
    without_save: WithoutSave = "show",
    at_end: AtEnd = nothing_at_end,
) -> list[StepReport]:
    """Train as ``argv`` says; gives the reports of the run. Every rank enters.

    ``on_report`` is called with each report, on every rank. A run that is ``verified`` against
    another may be in fp32 where others may not. ``without_save`` is where Megatron's output goes
    without ``--save``. ``at_end`` takes what is to be done where a failure ends this process.
    """
    parsed = parse_arguments(argv, verified=verified)
    validate_optimizer(parsed.args)
    require_same_start(parsed)  # before anything is written
    with outputs_ready(parsed.args, at_end=at_end):
        return _run(parsed, on_report, watch, without_save)


def _run(
    parsed: ParsedArguments,
    on_report: Callable[[StepReport], None] | None,
    watch: Watch | None,
    without_save: WithoutSave,
) -> list[StepReport]:
    args, platform = parsed.args, current_platform()
    platform.use(
        per_module_data_parallel_table(wrapper=ModuleDataParallel, optimizer=optimizer_per_module)
    )
    kept = None
    if args.keep_checkpoints:
        kept = CheckpointRetention(Path(args.save), keep=args.keep_checkpoints)
    checkpoints.use_whole_checkpoints(
        platform,
        asynchronous=args.async_save,
        lock=Path(args.save) / LOCK_FILE if args.save else None,
        saved=kept.prune if kept is not None else lambda: None,
    )
    engine = engine_of(args, parsed.model)
    step_rows = _scheduled(args, engine)
    datasets = _agreed_datasets(parsed, engine)
    make_own_groups(args, engine)  # with a default group, nothing more is compared
    hugging_face = parsed.family.load_hugging_face(parsed.model)
    table = adapter_table(parsed.model, hugging_face)
    exports = Exports(args, hugging_face, table, parsed.model_yaml, parsed.overrides)
    exports.check()
    from_folders = not checkpoints.has_checkpoint(args)
    mapping, freezing = with_adapters(hugging_face.mapping, table), freezing_of(args, parsed.model)
    own = Path(args.load_hf) if args.load_hf else Path(args.load or "") / CARRIED_FOLDER
    _say(folder_differences(own, Path(args.tokenizer_model)), args=args)
    trained = trained_modules(freezing, mapping=mapping)
    encoders = [name for name in parsed.model.encoders if name in trained]
    if datasets.media == 0:
        _say(map(_WITHOUT_MEDIA.format, encoders), args=args)
        encoders = []
    provider = ModelProvider(
        parsed.model,
        parsed.family,
        engine=engine,
        backend=backend_of(args),
        freezing=freezing,
        hf_folder=Path(args.load_hf) if args.load_hf and from_folders else None,
        adapter_folder=Path(args.load_lora) if args.load_lora and from_folders else None,
        offload=tensor_offload_of(args, platform=platform),
        seed=args.seed,
    )
    work = ModelAmounts.of(parsed.model, hugging_face, trains=freezing.trains)
    on_loss = None if watch is None else watch.loss
    forward_step = ForwardStep(platform, work=work.of_samples, on_loss=on_loss)
    step_check = StepCheck(
        args, forward_step, finalize=finalized_together if engine.apart else finalized
    )
    answers = None
    if args.eval_generate:
        answers = Answers(
            datasets.asked,
            forward_step,
            processor=datasets.train.processor,
            device=lambda: platform.device,
        )

    def built(chunks: list[Any], optimizer: Any) -> None:
        """Give chunks and optimizer to the engine, and to the others behind it."""
        engine.built(chunks, optimizer)
        step_check.built(chunks, optimizer)
        if answers is not None:
            answers.built(chunks)
        if watch is not None:
            watch.built(chunks, optimizer, mapping=mapping)

    sizes = step_sizes(args)
    with (
        traced(
            args.trace,
            platform=platform,
            rank=args.rank,
            world_size=args.ranks,
            module=lambda: engine.own,
        ) as recorder,
        _reported(engine, recorder, step_rows),
        megatron_output(args, without_save=without_save) as terminal,
        applied(setup_table(built)),
        applied(rates_table(rates_of(sizes))) if sizes and sizes.vary else nullcontext(),
    ):
        set_global_variables(args)  # with it comes Megatron's handler of signals
        saves_when_told()
        logs = log_folder(args, without_save=without_save)
        facts = start_facts(
            parsed, mapping=mapping, freezing=freezing, datasets=datasets, logs=logs
        )
        print_facts(facts, args=args, file=terminal)
        try:
            reports, unwritten = train(
                args,
                datasets,
                provider,
                engine=engine,
                forward_step=forward_step,
                answers=answers,
                terminal=terminal,
                on_report=on_report,
                on_validation=kept.evaluated if kept is not None and args.rank == 0 else None,
            )
        except SystemExit:  # SIGTERM, or another end that the flags ask for
            print_facts(end_facts(args, ended_early=True), args=args, file=terminal)
            raise
        datasets.close()
        _say(_met(datasets, encoders), args=args, file=terminal)
        exports.write_or_keep(provider.chunks)
        print_facts(end_facts(args), args=args, file=terminal)
        raise_together(unwritten)
    return reports


def _agreed_datasets(parsed: ParsedArguments, engine: Engine) -> DatasetProvider:
    """The data, once ranks agree on them and on the weights, and the folders are their run's."""
    args = parsed.args
    datasets = DatasetProvider(args, parsed.model, engine=engine)
    # The first rank has the outputs by now: no rank changes a folder that is another run's.
    of_rows = {"training": datasets.fingerprint, "validation": datasets.valid_fingerprint}
    require_same_data(args, {**of_rows, "plans": datasets.planned})
    _say(datasets.told(), args=args)
    checkpoints.check_checkpoint_folders(args, parsed.model_yaml, data=datasets.fingerprint)
    require_same_weights(args)
    return datasets


def _scheduled(args: Namespace, engine: Engine) -> StepRows | None:
    """Have the engine around Megatron's schedules; what tells these of rows' lengths, if any."""
    lengths, step_rows = row_lengths_of(args), None
    if lengths is not None and lengths.by_step:
        step_rows = StepRows()
        table = stepped_schedules_table(lambda found: engine.schedules(step_rows.schedules(found)))
        current_platform().use(table)
    elif engine.steps:
        current_platform().use(stepped_schedules_table(engine.schedules))
    return step_rows


def _met(datasets: DatasetProvider, encoders: Sequence[str]) -> list[str]:
    """What all ranks met in the data, and which ``encoders`` trained without media. Collective."""
    found = datasets.bad_samples.remarks.found, datasets.bad_samples.media
    media, remarks = Counter[str](), Remarks()
    for told, loaded in of_all_ranks(found):
        media += loaded
        for remark, (count, where) in told.items():
            remarks.add([remark], where=where, rows=count)
    said = [f"Training met {line}." for line in remarks.totals()]
    return said + [_WITHOUT_MEDIA.format(name) for name in encoders if not media[name]]


def _say(lines: Iterable[str], *, args: Namespace, file: TextIO | None = None) -> None:
    for line in lines if args.rank == 0 else ():
        print(line, file=file, flush=True)


@contextmanager
def _reported(engine: Engine, recorder: Recorder, step_rows: StepRows | None) -> Iterator[None]:
    engine.report_to(recorder)
    if step_rows is not None:
        step_rows.recorder = recorder
    if recorder is not NOTHING:
        PARALLEL_STATES.on_switch = lambda before, now: recorder.mark("switch", now, before=before)
    try:
        yield
    finally:
        PARALLEL_STATES.on_switch = None
        destroy_parallel_states()  # a process may run again
