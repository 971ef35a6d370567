"""Sizes by which models cut sounds to frames and images to patches, as their configs say them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from loongplug.data.folder_files import whole_number
from loongplug.data.sample import Grid

SAMPLE_RATE = 16_000  # of a second; what all these encoders hear
HOP = 160  # samples from one frame to the next

_QWEN2_AUDIO, _OMNI = "qwen2_audio_encoder", "qwen2_5_omni_audio_encoder"

# Frames of the longest sound of an encoder that has no positions beyond a piece of the sound: 300
# seconds, where its published feature extractor cuts.
_LONGEST_OF_PIECES = 30_000


@dataclass(frozen=True, kw_only=True)
class AudioSizes:
    """How a model cuts sounds, given by its kind of encoder. Lengths are in frames of 10 ms.

    ``behind`` frames of silence stand behind a sound's last one; with ``always``, every sound is
    filled up to so many. A state is made of two frames, and a token of one, or of two ``pooled``.
    """

    mel_bins: int
    longest: int  # frames of the longest sound that a model takes
    behind: int = 0
    always: bool = False
    pooled: bool = True

    @property
    def shortest(self) -> int:
        """Frames of the shortest sound that gives a token, or of all with ``always``."""
        if self.always:
            return self.longest
        return 3 if self.pooled else 1

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self | None:
        """By a model's config.json; None without an encoder of sounds, ValueError for others."""
        inner = config.get("thinker_config")  # of Qwen2.5-Omni, beside what speaks
        audio = (inner if isinstance(inner, Mapping) else config).get("audio_config")
        if not isinstance(audio, Mapping):
            return None
        kind = audio.get("model_type")
        if kind not in (_QWEN2_AUDIO, _OMNI):
            raise ValueError(
                f"audio_config has model_type {kind!r:.80}, where {_QWEN2_AUDIO} or {_OMNI} was"
                " expected"
            )
        bins, positions = (
            whole_number(audio.get(name, usual), name)
            for name, usual in (("num_mel_bins", 128), ("max_source_positions", 1500))
        )
        if kind == _OMNI:
            return cls(mel_bins=bins, longest=_LONGEST_OF_PIECES)
        return cls(mel_bins=bins, longest=2 * positions, behind=2)

    def frames_of(self, samples: int) -> int:
        """Of a sound of so many samples, those that hold some of it, or all with ``always``."""
        return self.longest if self.always else -(-samples // HOP)

    def grid(self, frames: int) -> Grid:
        """The rows that the encoder is given of a sound, all in one line."""
        return 1, 1, frames + self.behind

    def frames(self, grid: Grid) -> int:
        """What :meth:`grid` was made of."""
        return grid[2] - self.behind

    def states(self, frames: int) -> int:
        """What the second convolution, of stride 2, makes of a sound."""
        return (frames - 1) // 2 + 1

    def tokens(self, frames: int) -> int:
        """How many tokens stand in the text for a sound; of two states at least where pooled."""
        states = self.states(frames)
        return states // 2 if self.pooled else states


@dataclass(frozen=True, kw_only=True)
class PatchSizes:
    """How a model cuts images: sides of a patch in pixels, and of a visual token in patches."""

    patch_size: int
    spatial_merge_size: int = 1
    image_size: int | None = None  # the side of every image; None: each has its own

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self | None:
        """By a model's config.json; None where it does not say, ValueError for what are none."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping) or vision.get("patch_size") is None:
            return None
        ratio = config.get("downsample_ratio", 1)  # InternVL: tokens to a patch, by side
        if type(ratio) not in (int, float) or not 0 < ratio <= 1:
            raise ValueError(f"downsample_ratio is {ratio!r:.40}: expected above 0, up to 1")
        said = {"spatial_merge_size": round(1 / ratio), **vision}  # Qwen's say it themselves
        names = ("patch_size", "spatial_merge_size", "image_size")
        return cls(**{name: whole_number(said[name], name) for name in names if said.get(name)})
