"""What an encoder's passes leave behind in a rank's chunk, and how any pass is traced.

The model's own forward and backward run on tensors of the meta device, so that freezing,
recompute, adapters, sequence parallelism and deepstack streams are those of the run. What such a
rank lacks has stand-ins: counts of tokens, a device, a host.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
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

from loongplug.data.microbatch import MediaToCome, Unit
from loongplug.data.sample import Grid
from loongplug.estimate.live_bytes import ENCODER, INPUT, Answer, FlashAttention, Tape
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.models.architecture import EncoderArchitecture, VisionArchitecture
from loongplug.models.encoder import EncoderInput, HandedOn, payload_widths
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel
from loongplug.platform.prefetch import Copies

_META = torch.device("meta")
_SHARED = "shared buffers"  # one set for all layers and microbatches


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """Bytes of a forward and its backward.

    ``kept`` stays between them; ``forward`` is the most that the forward holds at one time,
    ``backward`` the most that the backward holds besides what stayed. None of these has what an
    encoder is ``given``, media of so many ``rows`` or what the stage before has made of them;
    ``keeps_given``: it stays, too.
    """

    kept: int = 0
    forward: int = 0
    backward: int = 0
    given: int = 0
    rows: int = 0
    keeps_given: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderStandIn:
    """A stand-in for an encoder's passes, with as many bytes on a tape.

    ``blank`` are those of the smallest unit, which stands in for no media, ``largest`` those of
    the largest; what lies between grows with the rows. Of each medium a pass makes as many rows as
    ``made`` says of its grid, [rows, width] of ``dtype``, which count for ``region``.
    """

    blank: PassBytes
    largest: PassBytes
    made: Callable[[Grid], int]
    width: int
    dtype: torch.dtype
    region: str

    def payload(self, given: EncoderInput | None, tape: Tape) -> Tensor:
        """What a pass makes; its graph holds what the encoder's would."""
        taken, rows, made = None, 0, 0
        if given is not None:
            taken = given.states if isinstance(given, HandedOn) else given.loaded
            rows = int(given.grids.prod(dim=-1).sum())
            made = sum(self.made((time, high, wide)) for time, high, wide in given.grids.tolist())
        start = torch.empty(0, requires_grad=True)
        found: Tensor = _Pass.apply(start, taken, self.of(rows), self, made, tape)
        return found

    def of(self, rows: int) -> PassBytes:
        """The bytes of a pass with so many rows of input; of 0, with what it keeps for itself."""
        low, high = self.blank, self.largest
        part = (max(rows, low.rows) - low.rows) / max(1, high.rows - low.rows)

        def at(low: int, high: int) -> int:
            return round(low + (high - low) * part)

        own = low.given if not rows and low.keeps_given else 0
        return PassBytes(
            kept=at(low.kept, high.kept) + own,
            forward=at(low.forward, high.forward) + own,
            backward=at(low.backward, high.backward),
            given=at(low.given, high.given) if rows else 0,
            rows=rows,
            keeps_given=high.keeps_given,
        )


class _Pass(torch.autograd.Function):
    """Holds bytes, and makes as many for a moment, where an encoder would compute."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        taken: Tensor | None,
        cost: PassBytes,
        encoder: EncoderStandIn,
        rows: int,
        tape: Tape,
    ) -> Tensor:
        """``taken`` are media as loaded, or what the stage before has made; None without."""
        with tape.region(ENCODER):
            kept = torch.empty(cost.kept, dtype=torch.uint8, device=_META)
        tape.work(cost.forward - cost.kept)
        ctx.save_for_backward(kept, taken if cost.keeps_given else None)
        ctx.work = cost.backward, tape
        ctx.given = None if taken is None else (taken.shape, taken.dtype)
        with tape.region(encoder.region):
            return torch.empty(rows, encoder.width, dtype=encoder.dtype, device=_META)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient of what was taken, where it needs one; of no media there is none."""
        held, (nbytes, tape) = ctx.saved_tensors, ctx.work
        tape.work(nbytes)
        came = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.given
            came = torch.empty(shape, dtype=dtype, device=_META)
        del held
        return None, came, None, None, None, None


def media_of(
    grids: Sequence[Grid], architecture: EncoderArchitecture, *, tape: Tape | None = None
) -> MediaToCome:
    """Media without values, as an encoder takes them; they are on a ``tape`` once taken."""
    coded, patch_frames = False, 1
    if isinstance(architecture, VisionArchitecture):
        coded, patch_frames = True, architecture.temporal_patch_size

    def values_loaded(grid: Grid) -> int:
        """An image is loaded as one frame of its patches."""
        return prod(grid) * architecture.row_values // (patch_frames if grid[0] == 1 else 1)

    def load(numbers: range) -> Tensor:
        size = sum(values_loaded(grids[number]) for number in numbers)
        with nullcontext() if tape is None else tape.region(INPUT):
            made = torch.empty(size, dtype=torch.uint8 if coded else torch.float32, device=_META)
        if tape is not None:  # between passes there are those alone that backwards need
            tape.highest[INPUT] = max(tape.highest[INPUT], tape.live[INPUT])
        return made

    def decode(numbers: range, loaded: Tensor) -> Tensor:
        count = sum(prod(grids[number]) for number in numbers)
        if not coded:
            return loaded.view(count, architecture.row_values)
        values = loaded.float()  # those of frames, before they lie side by side
        return values.new_empty(count, architecture.row_values)

    # The grids are on the host: no tape looks.
    given = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    return MediaToCome(grids=given, numbers=range(len(grids)), load=load, decode=decode)


def trace_encoder(
    args: Namespace,
    chunk: MultimodalModel,
    entry: Entry,
    architecture: EncoderArchitecture,
    grids: tuple[Grid, ...],
    *,
    stage: int,
    trains_before: bool,
) -> PassBytes:
    """Media of ``grids`` through a stage of an encoder, to its payload (which is not counted)."""
    encoder, states = EncoderOfStep(chunk, chunk, entry=entry, training=True), None
    encoder.trains_before = trains_before
    encoder.trains |= trains_before
    media = media_of(grids, architecture).taken()
    unit, given = Unit(grids=grids, media=media), media.loaded.untyped_storage()
    if stage:
        size = encoder.states(unit), payload_widths(architecture)[stage - 1]
        states = torch.empty(size, dtype=chunk.config.params_dtype, device=_META)
        given = states.untyped_storage()
    nbytes, held, rows = given.nbytes(), weakref.ref(given), unit.rows
    with tracing(args, chunk, region=ENCODER) as tape:
        payload = encoder.payload([unit], states=states)
        del media, unit, states, given  # nothing else holds them
        forward, kept = tape.most, tape.live[ENCODER] - payload.nbytes
        if not payload.requires_grad:
            return PassBytes(forward=forward, given=nbytes, rows=rows)
        keeps = held() is not None
        tape.restart()
        payload.backward(torch.empty_like(payload))
    return PassBytes(
        kept=kept,
        forward=forward,
        backward=max(0, tape.most - kept),
        given=nbytes,
        rows=rows,
        keeps_given=keeps,
    )


@contextmanager
def tracing(args: Namespace, *chunks: MultimodalModel, region: str) -> Iterator[Tape]:
    """A tape under which gradients go where the run's go: away, into buffers that are there."""
    tape = Tape(
        region=region,
        answers=answers(experts_per_token=args.moe_router_topk, experts=args.num_experts or 1),
    )
    for chunk in chunks:
        spread_tokens_evenly(chunk)
        for each in chunk.parameters():
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(drop)
    with FlashAttention(), devices_and_buffers(tape, region=_SHARED), tape.resizes(), tape:
        yield tape


def drop(tensor: Tensor) -> None:
    """Let go of a gradient: in a run it is added to a buffer that is there."""
    tensor.grad = None


def answers(*, experts_per_token: int, experts: int) -> dict[Any, Answer]:
    """For experts that each get as many tokens as the others."""

    def masked_select(values: Tensor, mask: Tensor) -> Tensor:  # mask: [some experts, tokens]
        return values.new_empty(mask.numel() * experts_per_token // experts)

    return {torch.ops.aten.masked_select.default: masked_select}


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
