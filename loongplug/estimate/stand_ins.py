"""Stand-ins for what a rank on the meta device lacks: counts of tokens, a device, a host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from loongplug.estimate.live_bytes import Answer, Tape
from loongplug.platform.copies import Copies

_META = torch.device("meta")
_aten = torch.ops.aten


def answers(*, experts_per_token: int, experts: int) -> dict[Any, Answer]:
    """For experts that each get as many tokens as the others."""

    def masked_select(values: Tensor, mask: Tensor) -> Tensor:  # mask: [some experts, tokens]
        return values.new_empty(mask.numel() * experts_per_token // experts)

    return {_aten.masked_select.default: masked_select}


def spread_tokens_evenly(module: nn.Module) -> None:
    """Have the experts in ``module`` take it that each gets as many tokens as the others."""
    for layer in module.modules():
        dispatcher = getattr(layer, "token_dispatcher", None)
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            dispatcher.preprocess = _even_split(dispatcher)
        elif isinstance(dispatcher, MoEAllGatherTokenDispatcher):
            dispatcher.dispatch_postprocess = _even_counts(dispatcher)


def _even_split(dispatcher: Any) -> Callable[[Tensor], Tensor]:
    def preprocess(routing_map: Tensor) -> Tensor:
        """Tokens of each local expert, [local experts] int64; ``routing_map`` [tokens, experts]."""
        ep, tp, local = dispatcher.ep_size, dispatcher.tp_size, dispatcher.num_local_experts
        tokens = routing_map.size(0) * dispatcher.config.moe_router_topk
        dispatcher.num_out_tokens = tokens
        each, more = divmod(tokens, dispatcher.num_experts)
        counts = torch.full((dispatcher.num_experts,), each)
        counts[:more] += 1
        mine = counts[dispatcher.local_expert_indices]
        if ep > 1 or tp > 1:
            dispatcher.input_splits = counts.reshape(ep, local).sum(1).numpy()
            dispatcher.output_splits = mine.sum().repeat(ep).numpy()
            dispatcher.output_splits_tp = (mine.sum() * ep).repeat(tp).numpy()
        if local > 1:
            dispatcher.num_global_tokens_per_local_expert = mine.repeat(tp * ep, 1)
        return mine * tp * ep

    return preprocess


def _even_counts(dispatcher: Any) -> Callable[[Tensor, Tensor], Any]:
    dispatch = type(dispatcher).dispatch_postprocess

    def dispatch_postprocess(hidden: Tensor, probs: Tensor) -> Any:
        """``hidden`` [all ranks' tokens, hidden], ``probs`` [all ranks' tokens, experts]."""
        tokens = hidden.shape[0] * dispatcher.router_topk // probs.shape[1]
        counts = torch.full((dispatcher.num_local_experts,), tokens)
        with patch.object(Tensor, "cpu", lambda _: counts):  # which are all that the host is told
            return dispatch(dispatcher, hidden, probs)

    return dispatch_postprocess


@contextmanager
def devices_and_buffers(tape: Tape, *, region: str) -> Iterator[None]:
    """Inside, this rank's device is meta, and Megatron's shared buffers are new ones of ``region``.

    They do not grow with the layers: each has one use at a time.
    """
    memory = parallel_state.get_global_memory_buffer()
    make = memory.get_tensor

    def get_tensor(*args: Any, **kwargs: Any) -> Tensor:
        with tape.region(region):
            made: Tensor = make(*args, **kwargs)
            return made

    with (
        patch.object(memory, "get_tensor", get_tensor),
        patch.dict(memory.buffer, clear=True),
        patch.object(torch.cuda, "current_device", lambda: _META),
    ):
        yield


class Away(Copies):
    """What leaves the device is none of the ``device`` tape's, and counts for that of the ``host``.

    A platform, and its copies, which move no bytes.
    """

    name = "cpu"
    device = _META

    def __init__(self, device: Tape) -> None:
        self._device = device
        self.host = Tape(region="host")

    def copies(self) -> Copies:
        """See :meth:`Platform.copies`."""
        return self

    def release(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as freed, though tensors on it live on."""
        self._device.given_back(storage)

    def host_like(self, tensor: Tensor) -> Tensor:
        """Counted by the host's tape alone."""
        with _disable_current_modes():
            found = torch.empty_like(tensor)
        self.host.see(found)
        return found

    def copy(self, target: Tensor, source: Tensor) -> None:
        """There are no values."""
