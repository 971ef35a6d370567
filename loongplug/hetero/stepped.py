"""One training or evaluation step: a timing around Megatron's own schedule."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.utils import get_model_config

from loongplug.data.microbatch import Microbatch
from loongplug.hetero.timing import Timing
from loongplug.observe.recorder import NOTHING, Recorder

Schedule = Callable[..., Any]


def stepped(schedule: Schedule, timing: Timing, *, recorder: Recorder = NOTHING) -> Schedule:
    """``schedule``, a forward-backward function of Megatron, with ``timing`` around it.

    The step's microbatches are taken from the first chunk's iterator beforehand. What Megatron
    does to all gradients once the schedule is through waits for the end of ``timing``.
    """

    def forward_backward(
        *,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **options: Any,
    ) -> Any:
        chunk = model[0] if isinstance(model, list) else model
        several = isinstance(data_iterator, list)
        first, *others = data_iterator if several else [data_iterator]
        with recorder.span("data", "the step's microbatches"):
            microbatches: list[Microbatch] = [next(first) for _ in range(num_microbatches)]
        timing.begin(chunk, microbatches, training=not forward_only)
        replayed: Iterator[Microbatch] = iter(microbatches)
        config = get_model_config(chunk)
        finalize, waiting = config.finalize_model_grads_func, _Waiting()
        config.finalize_model_grads_func = None if finalize is None else waiting
        try:
            result = schedule(
                data_iterator=[replayed, *others] if several else replayed,
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **options,
            )
        finally:
            config.finalize_model_grads_func = finalize
        timing.end()
        waiting.release(finalize)
        return result

    return forward_backward


class _Waiting:
    """Stands in for a function that is to be called later, with what it was called with."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append((args, kwargs))

    def release(self, function: Callable[..., Any] | None) -> None:
        for args, kwargs in self._calls:
            assert function is not None
            function(*args, **kwargs)
