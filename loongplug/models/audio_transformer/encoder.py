"""The audio transformer: log-mel frames of sounds in, states out.

All pieces of all sounds stand on one *line* of frames, so that one convolution serves them: silent
frames, which are zero, stand between them, and pieces start at even frames, so that every other
frame is the middle of a state's. A piece is what is convolved and attends by itself: a sound, or a
chunk of one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from loongplug.data.media_sizes import AudioSizes
from loongplug.data.microbatch import MediaInput
from loongplug.data.sample import Grid
from loongplug.models.audio_transformer import AudioTransformerConfig
from loongplug.models.encoder import Carried, EncoderInput, HandedOn, StagedEncoder, hold_key_bias
from loongplug.models.hf_mapping import CARRIED, parameter_name
from loongplug.models.layers.inputs import input_for_recompute, pack_segments
from loongplug.models.layers.mlp import activation
from loongplug.models.layers.norm import LayerNorm
from loongplug.models.layers.specs import Backend, vision_layer_spec
from loongplug.platform.devices import to_device

_TAPS = 3  # frames that a convolution sees at once


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Places of a unit's frames, states and tokens, all on the host."""

    length: int  # frames of the line, even
    frames: Tensor  # [rows] int64: the frame of each row
    silent: Tensor  # [length, 1] bool: frames without a row
    states: Tensor  # [states] int64: half the frame in the middle of each state
    positions: Tensor  # [states] int64: counted from 0 in each piece
    segments: tuple[int, ...]  # states of each piece
    kept: Tensor  # [states that become tokens] int64: all but odd last ones, if states are pooled


def plan_unit(sounds: Sequence[int], *, sizes: AudioSizes, chunk: int | None) -> UnitPlan:
    """The plan for sounds of so many frames each, in chunks of ``chunk`` frames if any."""
    pieces = [piece for frames in sounds for piece in _pieces(frames, sizes=sizes, chunk=chunk)]
    starts, length = [], 0
    for rows, _ in pieces:
        starts.append(length)
        length += (rows + 2) // 2 * 2  # one silent frame or two
    frames = _ranges(starts, [rows for rows, _ in pieces])
    states = tuple(states for _, states in pieces)
    return UnitPlan(
        length=length,
        frames=frames,
        silent=torch.ones(length, 1, dtype=torch.bool).index_fill(0, frames, False),
        states=_ranges([start // 2 for start in starts], states),
        positions=_ranges([0] * len(pieces), states),
        segments=states,
        kept=_kept(sounds, sizes=sizes, states=sum(states)),
    )


def _pieces(frames: int, *, sizes: AudioSizes, chunk: int | None) -> list[tuple[int, int]]:
    """Rows and states of a sound's pieces."""
    if chunk is None:
        return [(frames + sizes.behind, sizes.states(frames))]
    whole, rest = divmod(frames, chunk)
    return [(each, sizes.states(each)) for each in [chunk] * whole + ([rest] if rest else [])]


def _kept(sounds: Sequence[int], *, sizes: AudioSizes, states: int) -> Tensor:
    """Pairs go over a whole sound, whatever its chunks."""
    if not sizes.pooled:
        return torch.arange(states)
    of_sounds = [sizes.states(frames) for frames in sounds]
    starts = [0, *accumulate(of_sounds)][: len(sounds)]
    return _ranges(starts, [2 * sizes.tokens(frames) for frames in sounds])


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Consecutive numbers from each start, [sum of lengths] int64."""
    return torch.cat(
        [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    )


class LineConvolution(nn.Module):
    """``torch.nn.Conv1d`` of three taps and a padding of one, over frames in rows.

    As one product with a matrix, so that its precision and its determinism are those of all other
    products: cuDNN's convolutions take TF32 for float32 unless told otherwise.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, _TAPS))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, line: Tensor) -> Tensor:
        """[frames, inputs] to [frames / stride, outputs], each around every ``stride``-th frame."""
        frames = line.shape[0]
        padded = F.pad(line, (0, 0, 1, 1))
        seen = torch.cat([padded[tap : tap + frames : self.stride] for tap in range(_TAPS)], dim=1)
        matrix = self.weight.transpose(1, 2).flatten(1)  # [outputs, taps * inputs]
        return F.linear(seen, matrix, self.bias)


class AudioTransformer(StagedEncoder[AudioTransformerConfig]):
    """Whisper's encoder and its kin over packed sounds; attention stays within a sound or chunk."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: AudioTransformerConfig,
        *,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, architecture, backend=backend, pg_collection=pg_collection)
        self.tp_group = pg_collection.tp
        self._computed: Tensor | None = None
        if self.stage.first:
            self._build_embeddings()
        self.blocks = TransformerBlock(
            config=config,
            spec=vision_layer_spec(config, backend=backend),
            post_layer_norm=False,
            pg_collection=pg_collection,
        )
        for layer in self.blocks.layers:
            hold_key_bias(layer.self_attention.linear_qkv.bias, head=config.kv_channels)
        if self.stage.last:
            hidden, eps = architecture.hidden_size, architecture.layernorm_epsilon
            self.final_norm = LayerNorm(config, hidden, eps=eps)

    @classmethod
    def megatron_settings(cls, architecture: AudioTransformerConfig) -> dict[str, Any]:
        """LayerNorm and the kind's activation; chunks have to fit the positions."""
        chunk, positions = architecture.chunk, architecture.max_positions
        if chunk is not None and not 0 < chunk <= 2 * positions:
            raise ValueError(
                f"n_window is {chunk // 2}, so that a chunk has as many states, but there are "
                f"{positions} positions (max_positions): choose an n_window within 1 and "
                f"{positions}."
            )
        return {
            "normalization": "LayerNorm",
            "activation_func": activation(architecture.activation),
        }

    def _build_embeddings(self) -> None:
        config, architecture = self.config, self.architecture
        hidden = architecture.hidden_size
        self.conv1 = LineConvolution(architecture.mel_bins, hidden, stride=1)
        self.conv2 = LineConvolution(hidden, hidden, stride=2)
        self.add_module(CARRIED, Carried(architecture.carried_tensors()))
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(self.conv1.weight)
            config.init_method(self.conv2.weight)
            if (table := self._table()) is not None:
                with torch.no_grad():
                    table.copy_(sinusoids(*table.shape, device=table.device))

    def _table(self) -> Tensor | None:
        """The files' positions, [max_positions, hidden]; None where they are computed."""
        name = self.architecture.names.positions
        if name is None:
            return None
        return self.get_submodule(CARRIED).get_parameter(parameter_name(name))

    def forward(self, unit: EncoderInput) -> tuple[Tensor, list[Tensor]]:
        """Encode all sounds of one unit, or go on from where the stage before has come.

        The unit's rows are frames, each sound's followed by those behind it that the first
        convolution reads (:class:`~loongplug.data.media_sizes.AudioSizes`). Gives the normed
        states, of two each where they are pooled, [tokens, hidden], and no taps; from a stage that
        is not the last all states as they are, [states, hidden].
        """
        architecture, device = self.architecture, next(self.parameters()).device
        plan = plan_unit(self._frames(unit), sizes=architecture.sizes, chunk=architecture.chunk)
        own = unit.states if isinstance(unit, HandedOn) else self._embed(unit, plan)
        states = self.blocks(
            hidden_states=input_for_recompute(own[:, None], layers=self.blocks),
            attention_mask=None,
            packed_seq_params=pack_segments(plan.segments, device=device),
        )[:, 0]
        if not self.stage.last:
            return states, []
        if architecture.pooled:
            pairs = states.index_select(0, to_device(plan.kept, device)).unflatten(0, (-1, 2))
            states = pairs.mean(dim=1)
        return self.final_norm(states), []

    def _embed(self, unit: MediaInput, plan: UnitPlan) -> Tensor:
        """The convolutions' states of the frames plus their positions, [states, hidden]."""
        weight = self.conv1.weight
        frames, silent, kept, positions = (
            to_device(each, weight.device)
            for each in (plan.frames, plan.silent, plan.states, plan.positions)
        )
        line = weight.new_zeros(plan.length, unit.rows.shape[1])
        line = line.index_copy(0, frames, unit.rows.to(weight.dtype))
        # What the first convolution makes of silence is not what the second one has there.
        inner = F.gelu(self.conv1(line)).masked_fill(silent, 0.0)
        states = F.gelu(self.conv2(inner).index_select(0, kept))
        table = self._table()
        if table is None:
            table = self._computed_table(like=states)
        return states + table.index_select(0, positions)

    def _computed_table(self, *, like: Tensor) -> Tensor:
        """Positions that no file has, [states of the longest piece, hidden]; made once.

        Computed on the host. The dtype and the device are those of the states, and so of the
        weights.
        """
        kept = self._computed
        if kept is None or (kept.dtype, kept.device) != (like.dtype, like.device):
            sizes = self.architecture.sizes
            longest = sizes.states(self.architecture.chunk or sizes.longest)
            # An evaluation may ask first, and training takes no tensors of its kind.
            with torch.inference_mode(False):
                host = sinusoids(longest, like.shape[1], device=torch.device("cpu"))
                kept = self._computed = to_device(host, like.device).to(like.dtype)
        return kept

    def _frames(self, unit: EncoderInput) -> list[int]:
        """The frames of each sound."""
        sizes = self.architecture.sizes
        grids: list[Grid] = unit.grids.tolist()
        frames = [sizes.frames(grid) for grid in grids]
        for each in frames:
            if not sizes.shortest <= each <= sizes.longest:
                raise ValueError(
                    f"A sound has {each} frames of 10 ms, but the encoder takes "
                    f"{sizes.shortest} to {sizes.longest}: cut or fill sounds in the processor."
                )
        return frames


def sinusoids(length: int, channels: int, *, device: torch.device) -> Tensor:
    """Positions as sines and cosines of falling frequencies, [length, channels] float32."""
    half = channels // 2
    step = math.log(10_000) / (half - 1)
    frequencies = torch.exp(-step * torch.arange(half, device=device, dtype=torch.float32))
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


build_encoder = AudioTransformer.build
