"""The recorded runs of a plan, in forked processes."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from loongplug.verify.plan import Plan, Request, make_plan
from loongplug.verify.ranks import OnEvent, new_folder, run_ranks

RecordRank = Callable[..., None]


def preload(device: str) -> None:
    """Import once what ranks need, where that is safe: on the CPU.

    A process that has touched CUDA cannot fork ranks that use it, so there each rank imports.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device != "cpu":
        return
    import warnings

    import torch

    # Before any parallel region: threads of an OpenMP pool don't survive a fork.
    torch.set_num_threads(1)
    from loongplug.platform import activate

    platform = activate("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from loongplug.platform.upstream import apply_upstream_replacements

        apply_upstream_replacements(platform)
        # Megatron imports these two in the middle of a run.
        import megatron.core.models.mimo
        import megatron.core.tokenizers.text  # noqa: F401
        from PIL import Image

        import loongplug.training.run
        import loongplug.verify.step_recorder  # noqa: F401
        from loongplug.training.config import available_models, compose_model
        from loongplug.training.flags import read_command_line

        # What these keep for the next time, source lines, rules and a grammar, ranks inherit.
        read_command_line([])
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        Image.preinit()
        for name in {path.parent: name for name, path in available_models().items()}.values():
            composed = compose_model(model_name=name)
            composed.family.load_builder(composed.config)
            composed.family.megatron_arguments(composed.config)
            composed.family.load_hugging_face(composed.config)


def device_of(flags: Sequence[str], *, folder: Path) -> str:
    """The device that ``--device`` stands for, asked in another process: to ask touches CUDA."""

    def choose(rank: int, tell: OnEvent) -> str:
        from loongplug.platform import choose_device, requested_device

        return choose_device(requested_device(flags))

    (device,) = run_ranks(choose, 1, folder=folder / "plan")
    return str(device)


def plan_runs(request: Request, *, folder: Path) -> Plan:
    """:func:`loongplug.verify.plan.make_plan` in another process, so that it leaves no trace."""
    plan: Plan
    (plan,) = run_ranks(
        lambda rank, tell: make_plan(request, folder=folder), 1, folder=folder / "plan"
    )
    return plan


def record(
    flags: Sequence[str],
    *,
    ranks: int,
    device: str,
    folder: Path,
    on_step: Callable[[], None] = lambda: None,
    timeout: float | None = None,
    record_rank: RecordRank | None = None,
) -> Path:
    """Run ``flags`` on ``ranks`` forked processes; gives the folder with the recording."""
    new_folder(folder)
    run_ranks(
        partial(record_rank or _record_rank, flags=flags, folder=folder, device=device),
        ranks,
        folder=folder / "ranks",
        on_event=lambda line: on_step(),
        timeout=timeout,
    )
    return folder


def _record_rank(
    rank: int, tell: OnEvent, *, flags: Sequence[str], folder: Path, device: str
) -> None:
    from loongplug.platform import activate

    activate(device)  # before anything imports Megatron
    from loongplug.verify.step_recorder import record_run

    record_run(rank, tell, flags=flags, folder=folder, device=device)
