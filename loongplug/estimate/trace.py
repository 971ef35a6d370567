"""What passes leave behind in a rank's chunks, and what they take while they are at work.

The model's own forward and backward run on tensors of the meta device, so that freezing,
recompute, adapters, sequence parallelism and deepstack streams are those of the run.
"""

import weakref
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from loongplug.data.microbatch import MediaInput, Unit
from loongplug.data.positions import Grid
from loongplug.estimate.stand_ins import answers, devices_and_buffers, spread_tokens_evenly
from loongplug.estimate.tape import ENCODER, FlashAttention, Tape
from loongplug.hetero.encoder_of_step import EncoderOfStep
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.encoder_stages import payload_widths
from loongplug.models.entries import Entry
from loongplug.models.multimodal import MultimodalModel

_META = torch.device("meta")
_SHARED = "shared buffers"  # one set for all layers and microbatches


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """Bytes of a forward and its backward.

    ``kept`` stays between them; ``forward`` is the most that the forward holds at one time,
    ``backward`` the most that the backward holds besides what stayed. None of these has what an
    encoder is given, media or what the stage before has made; ``given`` is that where it stays,
    too. The encoder's input has so many ``rows``.
    """

    kept: int = 0
    forward: int = 0
    backward: int = 0
    given: int = 0
    rows: int = 0


def media_of(grids: Sequence[Grid], *, row_values: int) -> MediaInput:
    """Media without values, of so many numbers to a row."""
    return MediaInput(
        rows=torch.empty(sum(map(prod, grids)), row_values, device=_META),
        grids=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),  # on the host: no tape looks
    )


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
    """Media of ``grids`` through a stage of an encoder, to its payload (which is not counted).

    ``trains_before``: whether a stage before this one trains.
    """
    encoder, states = EncoderOfStep(chunk, chunk, entry=entry, training=True), None
    encoder.trains_before = trains_before
    encoder.trains |= trains_before
    media = media_of(grids, row_values=architecture.row_values)
    unit, given = Unit(grids=grids, media=media), media.rows.untyped_storage()
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
            return PassBytes(forward=forward, rows=rows)
        stays = nbytes if held() is not None else 0
        tape.restart()
        payload.backward(torch.empty_like(payload))
        backward = max(0, tape.most - kept)
    return PassBytes(kept=kept, forward=forward, backward=backward, given=stays, rows=rows)


@contextmanager
def tracing(args: Namespace, *chunks: MultimodalModel, region: str) -> Iterator[Tape]:
    """A tape under which gradients go where the run's go: away, into buffers that are there."""
    tape = Tape(
        region=region,
        answers=answers(experts_per_token=args.moe_router_topk, experts=args.num_experts or 1),
    )
    with ExitStack() as entered:
        for chunk in chunks:
            spread_tokens_evenly(chunk)
            for each in chunk.parameters():
                if each.requires_grad:
                    hook = each.register_post_accumulate_grad_hook(drop)
                    entered.callback(hook.remove)
        entered.enter_context(FlashAttention())
        entered.enter_context(devices_and_buffers(tape, region=_SHARED))
        entered.enter_context(tape.resizes())
        yield entered.enter_context(tape)


def drop(tensor: Tensor) -> None:
    """Let go of a gradient: in a run it is added to a buffer that is there."""
    tensor.grad = None
