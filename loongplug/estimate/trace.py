"""What one microbatch leaves behind in a rank's chunks, and what it takes while it is at work.

The model's own forward and backward run on tensors of the meta device, so that freezing,
recompute, adapters, sequence parallelism and deepstack streams are those of the run. Layers are
those without TransformerEngine, attention keeps what flash kernels keep.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from torch import Tensor

from loongplug.data.microbatch import VisionInput
from loongplug.estimate.answers import (
    answers,
    devices_and_buffers,
    spread_tokens_evenly,
    spread_visual_tokens,
)
from loongplug.estimate.tape import FlashAttention, Tape
from loongplug.models.decoder import TextDecoder
from loongplug.models.deepstack import features_behind
from loongplug.models.features import VisionFeatures
from loongplug.models.layers.packed import pack_segments
from loongplug.models.multimodal import MultimodalModel
from loongplug.models.vision_encoder import patch_values
from loongplug.training.forward_step import token_loss

ENCODER, DECODER = "encoder activations", "decoder activations"
_META = torch.device("meta")
PIXELS = "pixels"
SHARED = "shared buffers"  # one set for all layers and microbatches


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of one pass through a chunk.

    ``encoder`` and ``decoder`` stay between its forward and its backward; ``forward`` is the most
    that its forward holds at one time, of its own, ``backward`` the most that its backward holds
    besides what stayed. ``received`` and ``sent`` are the hidden states from and to other stages.
    """

    encoder: int = 0
    decoder: int = 0
    forward: int = 0
    backward: int = 0
    received: int = 0
    sent: int = 0


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """A microbatch: rows of ``length`` tokens, and the patch grids of its images and videos.

    ``segments`` are the lengths of a pack's samples and of its padding.
    """

    rows: int
    length: int
    grids: tuple[tuple[int, int, int], ...]
    segments: tuple[int, ...] | None = None

    @property
    def patches(self) -> int:
        """Of all images and videos."""
        return sum(time * height * width for time, height, width in self.grids)


class Tracer:
    """Traces the chunks of one rank, which has to be Megatron's current one."""

    def __init__(self, args: Namespace, shapes: Shapes, *, merge: int) -> None:
        """``merge``: patches that make one token."""
        self._args = args
        self._shapes = shapes
        self._tokens = shapes.patches // merge
        tp = args.tensor_model_parallel_size
        # Visual tokens in this rank's part of the sequence, where they are spread evenly.
        self._share = -(-self._tokens // tp) if args.sequence_parallel else self._tokens

    def encoder(self, chunk: MultimodalModel) -> Cost:
        """A unit through encoder and projector, to its payload (which is not counted)."""
        with self._tape(ENCODER, chunk) as tape:
            pixels = self._pixels(chunk)
            before = tape.total
            (entry,) = chunk.encoders
            payload = chunk.encode(entry, self._vision(pixels)).packed()
            forward = tape.most - before
            kept = tape.total - before - payload.nbytes - tape.live.get(SHARED, 0)
            if not payload.requires_grad:
                return Cost(forward=forward)
            tape.restart()
            payload.backward(torch.empty_like(payload))
            return Cost(encoder=kept, forward=forward, backward=self._more(tape, before + kept))

    def decoder(self, chunk: MultimodalModel, *, features_train: bool) -> Cost:
        """A chunk whose features, where it takes any, come from a feature source."""
        decoder = chunk.text_decoder
        features = None
        with self._tape(DECODER, chunk) as tape:
            before = 0
            if chunk.pre_process:
                width = decoder.config.hidden_size
                leaf = torch.empty(
                    self._share,
                    decoder.config.feature_width,
                    dtype=decoder.config.params_dtype,
                    device=_META,
                ).requires_grad_(features_train)
                before = tape.total
                features = VisionFeatures.unpacked(leaf, hidden=width)
            return self._through(tape, chunk, features=features, before=before)

    def inline(self, chunk: MultimodalModel) -> Cost:
        """A chunk that encodes its own unit within its forward."""
        with self._tape(DECODER, chunk) as tape:
            return self._through(tape, chunk, encodes=True)

    def _through(
        self,
        tape: Tape,
        chunk: MultimodalModel,
        *,
        features: VisionFeatures | None = None,
        encodes: bool = False,
        before: int = 0,
    ) -> Cost:
        decoder = chunk.text_decoder
        received = 0
        if not decoder.pre_process:
            hidden = self._hidden(decoder)
            decoder.set_input_tensor(hidden)
            received = hidden.nbytes
            del hidden
        ids, positions, mask = self._text()
        segments = self._shapes.segments
        visual = decoder.visual_tokens((), ids) if decoder.pre_process else None
        if encodes:
            with tape.region(PIXELS):
                vision = self._vision(self._pixels(chunk))
            with tape.region(ENCODER):
                (entry,) = chunk.encoders
                encoded = chunk.encode(entry, vision)
            del vision  # the graph may not need the pixels as they come
            assert visual is not None, "the first stage encodes"
            features = decoder.share_of(encoded, visual)
            del encoded
        output = decoder(
            ids,
            positions,
            features=features,
            visual=visual,
            labels=ids if decoder.post_process else None,
            loss_mask=mask,
            packed_seq_params=None if segments is None else pack_segments(segments, device=_META),
        )
        del features, visual
        if decoder.post_process:
            output = token_loss(mask, output)[0]
        del ids, positions, mask
        forward = tape.most - before
        gradient = None
        if not decoder.post_process:
            gradient = torch.empty_like(output)
            deallocate_output_tensor(output, decoder.config.deallocate_pipeline_outputs)
        given = 0 if gradient is None else gradient.nbytes
        encoder = tape.live.get(ENCODER, 0) + tape.live.get(PIXELS, 0)
        kept = tape.total - before - given - tape.live.get(SHARED, 0)
        tape.restart()
        if output.requires_grad:
            if gradient is None:
                output.backward()
            else:
                custom_backward(output, gradient)
        return Cost(
            encoder=encoder,
            decoder=kept - encoder,
            forward=forward,
            backward=self._more(tape, before + kept),
            received=received,
            sent=given,
        )

    @staticmethod
    def _more(tape: Tape, before: int) -> int:
        return max(0, tape.most - before)

    @contextmanager
    def _tape(self, region: str, *chunks: MultimodalModel) -> Iterator[Tape]:
        """A tape under which gradients go where the run's go: away, into buffers that are there."""
        handles = [
            each.register_post_accumulate_grad_hook(drop)
            for chunk in chunks
            for each in chunk.parameters()
            if each.requires_grad
        ]
        tape = Tape(
            region=region,
            answers=answers(
                experts_per_token=self._args.moe_router_topk,
                experts=self._args.num_experts or 1,
            ),
        )
        for chunk in chunks:
            spread_tokens_evenly(chunk)
            spread_visual_tokens(chunk.text_decoder, tokens=self._tokens, share=self._share)
        try:
            with FlashAttention(), devices_and_buffers(tape, region=SHARED), tape:
                yield tape
        finally:
            for handle in handles:
                handle.remove()

    def _pixels(self, chunk: MultimodalModel) -> Tensor:
        (entry,) = chunk.encoders
        encoder: Any = chunk.modules_of(entry)[entry.name]
        values = patch_values(encoder.architecture)
        return torch.empty(self._shapes.patches, values, device=_META)  # float32, as they come

    def _vision(self, pixels: Tensor) -> VisionInput:
        return VisionInput(pixels=pixels, grid_thw=torch.tensor(self._shapes.grids))

    def _text(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = (self._shapes.rows, self._shapes.length)
        ids = torch.empty(shape, dtype=torch.int64, device=_META)
        return ids, torch.empty((3, *shape), dtype=torch.int64, device=_META), ids.float()

    def _hidden(self, decoder: TextDecoder) -> Tensor:
        """What the stage before sends, with the deepstack streams that are left."""
        config = decoder.config
        first = decoder.decoder.layers[0].layer_number - 1
        streams = 1 + features_behind(layer=first, deepstack=config.deepstack_features)
        length = self._shapes.length
        if config.sequence_parallel:
            length //= config.tensor_model_parallel_size
        shape = (streams * length, self._shapes.rows, config.hidden_size)
        return torch.empty(shape, dtype=config.params_dtype, device=_META).requires_grad_()


def drop(parameter: Tensor) -> None:
    """Let go of a gradient: in a run it is added to a buffer that is there."""
    parameter.grad = None
