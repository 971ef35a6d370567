"""What the nodes of the overlapped schedule report: forward, backward, weights' gradients.

A node is timed on its own stream, from when what it waits for is done. Its events are written in
the order in which the host enqueued them, which is what :mod:`loongplug.observe.exchanges` reads.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.pipeline_parallel.utils import get_comm_stream

from loongplug.observe.recorder import Recorder, Span

_Function = Callable[..., Any]
_OfPass = tuple[int | None, int | None]  # microbatch and chunk


class NodeHooks:
    """Wrappers of Megatron's schedule nodes that report to one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forward: _OfPass = None, None
        self._backward: _OfPass = None, None

    def begin(self, *, forward: _OfPass, backward: _OfPass) -> None:
        """Whose nodes run from now on, each by microbatch and chunk."""
        self._forward, self._backward = forward, backward

    def layer(self, original: _Function) -> _Function:
        """Nodes of a layer know its number, from 1, by the state that they share."""

        @functools.wraps(original)
        def _build_callable_nodes(plan: Any, *args: Any, **kwargs: Any) -> None:
            original(plan, *args, **kwargs)
            plan.layer_state.number = plan.layer.layer_number

        return _build_callable_nodes

    def on_stream(self, original: _Function) -> _Function:
        """A node's forward or backward, within its stream and behind its wait."""

        @contextmanager
        @functools.wraps(original)
        def stream_acquire_context(node: Any, name: str | None = None) -> Iterator[None]:
            direction = "backward" if str(name).endswith("backward") else "forward"
            with original(node, name), self._span(node, direction):
                yield

        return stream_acquire_context

    def weights(self, original: _Function) -> _Function:
        """A node's weights' gradients, where they are left for later."""

        @functools.wraps(original)
        def backward_dw(node: Any) -> None:
            if not node.delay_wgrad_compute:
                original(node)  # does nothing
                return
            with self._span(node, "wgrad"):
                original(node)

        return backward_dw

    def _span(self, node: Any, direction: str) -> Span:
        microbatch, chunk = self._forward if direction == "forward" else self._backward
        layer = getattr(getattr(node, "layer_state", None), "number", None)
        return self._recorder.span(
            "node",
            node.name,
            direction=direction,
            stream="communication" if node.stream is get_comm_stream() else "computation",
            microbatch=microbatch,
            chunk=chunk,
            **({} if layer is None else {"layer": layer}),
        )
