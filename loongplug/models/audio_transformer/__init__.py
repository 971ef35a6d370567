"""Audio transformers over log-mel frames, Whisper's, Qwen2-Audio's and Qwen2.5-Omni's: config
classes, names of tensors and keys of config.json.

One encoder, which data drive; projectors and decoders are other parts'.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from loongplug.data.media_sizes import AudioSizes
from loongplug.data.sample import Grid
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.family import HuggingFacePart, fixed_epsilon
from loongplug.models.hf_mapping import Shape
from loongplug.models.hf_rows import LayerNames, Table, carried_rows, layer_rows
from loongplug.models.parts import Part

_EPSILON = 1e-5  # of norms in transformers' model: torch's, which all kinds have
_BEHIND = 2  # frames of silence that the convolutions read behind a sound in a padded window


@dataclass(frozen=True, kw_only=True)
class AudioNames(LayerNames):
    """What the files of one kind of tower call its tensors, behind the tower's root.

    None stands for what it does not have. ``positions`` is a whole name; to the others ``.weight``
    and ``.bias`` are added. The keys have no bias in any kind.
    """

    positions: str | None = None  # without it, positions are computed
    final_norm: str
    layer: str = "layers.{}."
    norms: tuple[str, str] = ("self_attn_layer_norm", "final_layer_norm")
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    proj: str = "self_attn.out_proj"
    mlp: tuple[str, str] = ("fc1", "fc2")


WHISPER = AudioNames(positions="embed_positions.weight", final_norm="layer_norm")
OMNI = AudioNames(final_norm="ln_post")


@dataclass(frozen=True, kw_only=True)
class AudioTransformerConfig(EncoderArchitecture):
    """Two convolutions, the second of stride 2, and a transformer over what they make of frames.

    No dropout and no layers left out at random, whatever config.json says. Fixed for a kind:
    ``names`` says what it has and what the files call that, ``always`` that every sound is filled
    up to the longest one, ``pooled`` that two states become one token.
    """

    rows_per_state: ClassVar[int] = 2
    names: ClassVar[AudioNames] = WHISPER
    always: ClassVar[bool] = False
    pooled: ClassVar[bool] = True
    mel_bins: int = 128
    max_positions: int = 1500  # states, of two frames each
    activation: str = "gelu"  # of the MLPs; the convolutions have gelu
    layernorm_epsilon: float = 1e-5

    @property
    def row_values(self) -> int:
        """The mel bins of one frame."""
        return self.mel_bins

    @property
    def sizes(self) -> AudioSizes:
        """How it cuts sounds: in a window of ``max_positions`` states."""
        return AudioSizes(
            mel_bins=self.mel_bins,
            longest=2 * self.max_positions,
            behind=_BEHIND,
            always=self.always,
            pooled=self.pooled,
        )

    @property
    def chunk(self) -> int | None:
        """Frames of the chunks that have no part in each other; None: whole sounds."""
        return None

    def states(self, grid: Grid) -> int:
        """States: one for every two frames of a piece, a sound or a chunk of one."""
        frames = self.sizes.frames(grid)
        whole, rest = divmod(frames, self.chunk or frames)
        states = whole * self.sizes.states(self.chunk or frames)
        return states + (self.sizes.states(rest) if rest else 0)

    def tokens(self, grid: Grid) -> int:
        """Tokens: one for each pair of states, or for each state where they are not pooled."""
        return self.sizes.tokens(self.sizes.frames(grid))

    def blank_grid(self) -> Grid:
        """The shortest sound that gives a token."""
        return self.sizes.grid(self.sizes.shortest)

    def grid_of(self, tokens: int) -> Grid:
        """A sound, however long."""
        states = 2 * tokens if self.pooled else tokens
        return self.sizes.grid(2 * states - 1)

    def attention_window(self, layer: int) -> int | None:
        """Chunks, where there are some, else whole sounds."""
        return self.chunk

    def carried_tensors(self) -> Mapping[str, Shape]:
        """The tensor of the files that never trains: the table of positions."""
        positions = self.names.positions
        return {} if positions is None else {positions: (self.max_positions, self.hidden_size)}


@dataclass(frozen=True, kw_only=True)
class WhisperAudioConfig(AudioTransformerConfig):
    """Whisper's: a sound is a whole window, and each state a token."""

    always: ClassVar[bool] = True
    pooled: ClassVar[bool] = False
    mel_bins: int = 80  # 128 in large-v3


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioEncoderConfig(AudioTransformerConfig):
    """Qwen2-Audio's: Whisper's over the frames that a sound has."""


@dataclass(frozen=True, kw_only=True)
class OmniAudioConfig(AudioTransformerConfig):
    """Qwen2.5-Omni's: chunks of 2 x ``n_window`` frames are convolved and attend by themselves.

    Positions start over in each chunk, and pairs of states go over the whole sound.
    ``output_dim`` is the decoder's width, which its files have once more, and ``longest`` the
    frames of the longest sound that its feature extractor takes.
    """

    names: ClassVar[AudioNames] = OMNI
    n_window: int = 100
    output_dim: int
    longest: int = 30_000

    @property
    def sizes(self) -> AudioSizes:
        """Nothing behind a sound is read."""
        return AudioSizes(mel_bins=self.mel_bins, longest=self.longest)

    @property
    def chunk(self) -> int | None:
        """Twice the window."""
        return 2 * self.n_window

    def carried_tensors(self) -> Mapping[str, Shape]:
        """The marks of a sound's begin and end, which the text has tokens for."""
        return {"audio_bos_eos_token.weight": (2, self.output_dim)}


def tensors(audio: AudioTransformerConfig, *, ours: str, theirs: str) -> HuggingFacePart:
    """The audio encoder, of any kind; weights of convolutions as torch has them.

    Nothing is computed from ``scale_embedding``, nor from the probabilities of dropouts.
    """
    whole, hidden = Table(f"{ours}.", f"{theirs}."), audio.hidden_size
    return HuggingFacePart(
        rows=[
            whole.row("conv1.weight", "conv1.weight", (hidden, audio.mel_bins, 3), folded=False),
            whole.row("conv1.bias", "conv1.bias", (hidden,)),
            whole.row("conv2.weight", "conv2.weight", (hidden, hidden, 3), folded=False),
            whole.row("conv2.bias", "conv2.bias", (hidden,)),
            *layer_rows(audio, audio.names, ours=ours, theirs=theirs, key_bias=False),
            *whole.norm("final_norm", audio.names.final_norm, hidden),
            *carried_rows(audio.carried_tensors(), ours=ours, theirs=theirs),
        ],
        inexpressible=fixed_epsilon(audio, ours=ours, theirs=_EPSILON),
    )


_part = partial(
    Part,
    build="loongplug.models.audio_transformer.encoder:build_encoder",
    hugging_face="loongplug.models.audio_transformer:tensors",
)
_JSON = {
    "num_layers": "encoder_layers",
    "hidden_size": "d_model",
    "ffn_hidden_size": "encoder_ffn_dim",
    "num_attention_heads": "encoder_attention_heads",
    "mel_bins": "num_mel_bins",
    "max_positions": "max_source_positions",
    "activation": "activation_function",
    "initializer_range": "initializer_range",
}

LOONGPLUG_PARTS = (
    _part(
        name="whisper_audio",
        config_class=WhisperAudioConfig,
        config_json=_JSON | {"initializer_range": "init_std"},
        model_type="whisper",
    ),
    _part(
        name="qwen2_audio",
        config_class=Qwen2AudioEncoderConfig,
        config_json=_JSON,
        model_type="qwen2_audio_encoder",
    ),
    _part(
        name="qwen2_5_omni_audio",
        config_class=OmniAudioConfig,
        config_json=_JSON | {"n_window": "n_window", "output_dim": "output_dim"},
        model_type="qwen2_5_omni_audio_encoder",
    ),
)
