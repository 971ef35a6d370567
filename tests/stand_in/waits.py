"""Where a run makes the host wait for the device: counted by part of the step and by line."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

STEP = "rest of the step"
# Parts of a step by the function that is entered for each: file, name. The innermost one counts.
PARTS = {
    ("pipeline_parallel/schedules.py", "forward_step"): "forward",
    ("pipeline_parallel/schedules.py", "backward_step"): "backward",
    ("hetero/executor.py", "begin"): "phase 1",
    ("hetero/executor.py", "end"): "phase 3",
    ("models/common/model_chunk_schedule_plan.py", "run"): "overlapped forward and backward",
    ("training/training.py", "train_step"): STEP,
}
OTHERWISE = "outside of steps"
IN_A_MICROBATCH = ("forward", "backward", "overlapped forward and backward")
PHASES = ("phase 1", "phase 3")
# Megatron's dispatcher has to know on the host how many tokens each expert gets.
NEEDED = "token_dispatcher.py:_maybe_dtoh_and_synchronize"
# Megatron's stages tell each other the shape of what comes, where ``variable_seq_lengths`` asks.
SHAPES = "p2p_communication.py:_communicate_shapes"
# Between microbatches, once or a few times a step: what the gradients and their norm say, and
# which figures all ranks have.
OF_A_STEP = (
    *("platform/finite_values.py:is_finite", "platform/finite_values.py:take_broken"),
    *("training/step_check.py:_look", "optimizer_per_module.py:_told_to_all"),
    *("clip_grads.py:get_grad_norm_fp32", "optimizer/optimizer.py:has_grad_norm_group"),
    "common_utils.py:logical_and_across_model_parallel_group",
    "common_utils.py:reduce_max_stat_across_model_parallel_group",
)
RECORDER = "loongplug/verify/"


@dataclass(frozen=True, order=True)
class Wait:
    """What waited, in which part, at which line of whose file."""

    part: str
    kind: str
    by: str
    line: str


def counted(run: Callable[[], None], extension: ModuleType) -> dict[Wait, int]:
    """The waits of ``run``, in whichever thread they are."""
    counts: Counter[Wait] = Counter()

    def heard(kind: str, by: str) -> None:
        own = sys._getframe(0).f_back  # None in a backward that is not a function of Python's
        line = next((told for frame in _frames(own) if (told := _line(frame))), "")
        if threading.current_thread() is not threading.main_thread():
            # A backward: what called it stands on the main thread.
            own = sys._current_frames().get(threading.main_thread().ident or 0, own)
            line = line or next((told for frame in _frames(own) if (told := _line(frame))), "")
        part = next((told for frame in _frames(own) if (told := _part(frame))), OTHERWISE)
        counts[Wait(part, kind, by, line)] += 1

    extension.listen(heard)
    try:
        run()
    finally:
        extension.listen(None)
    return dict(counts)


def not_needed(waits: Iterable[Wait]) -> list[Wait]:
    """Those in a microbatch or in phases 1 and 3 that a run can do without, but the recorder's."""
    parts = (*IN_A_MICROBATCH, *PHASES)
    return [
        wait
        for wait in waits
        if wait.part in parts
        and not wait.line.endswith(NEEDED)
        and not wait.line.startswith(RECORDER)
    ]


def between_microbatches(waits: Mapping[Wait, int]) -> tuple[int, int, list[Wait]]:
    """How many a step has by :data:`OF_A_STEP`, how many by :data:`SHAPES`, and the others."""
    rest = {wait: count for wait, count in waits.items() if wait.part == STEP}
    known = sum(count for wait, count in rest.items() if wait.line.endswith(OF_A_STEP))
    shapes = sum(count for wait, count in rest.items() if wait.line.endswith(SHAPES))
    return known, shapes, [wait for wait in rest if not wait.line.endswith((*OF_A_STEP, SHAPES))]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _part(frame: FrameType) -> str | None:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return next(
        (
            part
            for (end, function), part in PARTS.items()
            if name == function and file.endswith(end)
        ),
        None,
    )


def _line(frame: FrameType) -> str | None:
    """``package/file.py:function`` of our own code or Megatron's, without a number that moves."""
    path = Path(frame.f_code.co_filename)
    for package in ("loongplug", "megatron"):
        if package in path.parts:
            at = len(path.parts) - 1 - path.parts[::-1].index(package)
            return f"{'/'.join(path.parts[at:])}:{frame.f_code.co_name}"
    return None
