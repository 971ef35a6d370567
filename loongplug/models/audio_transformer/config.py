"""Architecture of an audio transformer. YAML files fill these dataclasses, one for each kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from loongplug.data.media_sizes import AudioSizes
from loongplug.data.sample import Grid
from loongplug.models.architecture import EncoderArchitecture
from loongplug.models.layer_names import LayerNames

Shape = tuple[int, ...]

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
        """Of one frame: its mel bins."""
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
        """One for every two frames of a piece, a sound or a chunk of one."""
        frames = self.sizes.frames(grid)
        whole, rest = divmod(frames, self.chunk or frames)
        states = whole * self.sizes.states(self.chunk or frames)
        return states + (self.sizes.states(rest) if rest else 0)

    def tokens(self, grid: Grid) -> int:
        """One for each pair of states, or for each state where they are not pooled."""
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
        """What the files have that never trains: the table of positions."""
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
