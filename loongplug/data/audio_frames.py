"""Sounds to rows of frames: the log mel spectrum that encoders of Whisper's kind take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from loongplug.data.media_sizes import HOP, SAMPLE_RATE, AudioSizes
from loongplug.data.sample import Grid

if TYPE_CHECKING:
    from torch import Tensor

# Frames behind a sound's last one whose windows reach into the sound, and those until one whose
# window does not reach to where the sound is mirrored at its end.
_FADING, _CLEAR = 2, 2
_RANGE = 2.0  # from the loudest value of a sound to the least: 8 powers of ten, divided by 4
_SILENCE = (-10.0 + 4.0) / 4.0  # the least value that there is


class AudioFrames:
    """A feature extractor of Whisper's kind, and how what it makes becomes rows of frames of 10 ms.

    Behind a sound's rows are those of the silence that :class:`AudioSizes` names, as in
    transformers; behind frame ``longest``, zeros.
    """

    def __init__(self, extractor: WhisperFeatureExtractor, sizes: AudioSizes) -> None:
        """Raises ValueError where the extractor is not one for a model of these sizes."""
        expected = {
            "feature_size": sizes.mel_bins,
            "sampling_rate": SAMPLE_RATE,
            "hop_length": HOP,
            "n_fft": 400,
            "padding_side": "right",
            "padding_value": 0.0,
            "dither": 0.0,
        }
        if sizes.always:
            expected["nb_max_frames"] = sizes.longest
        wrong = [
            f"{name} {found!r:.40}, where {value!r} was expected"
            for name, value in expected.items()
            if (found := getattr(extractor, name, None)) != value
        ]
        if wrong:
            raise ValueError(f"{' and '.join(wrong)}: put in the one that belongs to this model")
        self._extractor = extractor
        self.sizes = replace(sizes, longest=min(sizes.longest, extractor.nb_max_frames))
        self.most_samples = self.sizes.longest * HOP  # of a sound that can be used
        self._whole = sizes.longest  # frames of what the model in transformers takes

    def grid(self, samples: int) -> Grid:
        """What becomes of a sound of so many samples; ValueError for one that cannot be used."""
        if samples > self.most_samples:
            raise ValueError(
                f"it is longer than the {self.most_samples / SAMPLE_RATE:g} seconds that the model"
                " takes"
            )
        frames = self.sizes.frames_of(samples)
        if samples < 1 or self.sizes.tokens(frames) < 1:
            raise ValueError(
                f"it lasts {samples / SAMPLE_RATE:.4f} seconds, which is too short for a token"
            )
        return self.sizes.grid(frames)

    def tokens(self, grid: Grid) -> int:
        """How many tokens stand in the text for a sound of this grid."""
        return self.sizes.tokens(self.sizes.frames(grid))

    def frames(self, sound: NDArray[np.float32]) -> tuple[Tensor, Grid]:
        """Of a sound [samples], 16,000 a second, its rows [frames, mel_bins] float32, and its grid.

        Within 1e-6, they are those of the sound filled up to ``nb_max_frames``: what is silence in
        any case is not computed. ValueError for a sound that cannot be used.
        """
        grid = self.grid(len(sound))
        count = grid[2]
        heard = -(-len(sound) // HOP) + _FADING + _CLEAR
        features = self._extractor(
            sound,
            sampling_rate=SAMPLE_RATE,
            padding="max_length",
            max_length=min(heard * HOP, self._extractor.n_samples),
            return_tensors="pt",
        )["input_features"][0]  # [mel_bins, frames]
        rows = features[:, -1].repeat(count, 1)  # where fewer are made, the last is of silence
        made = features.T[:count]
        rows[: len(made)] = made
        rows[self.sizes.longest :] = 0.0
        return rows, grid

    def model_inputs(self, rows: Tensor, grids: Tensor) -> dict[str, Tensor]:
        """What the model in transformers is given, of the rows of sounds one after the other.

        Frames are those of the longest sound here, or that there may be, for a model that looks
        behind sounds: ``input_features`` [sounds, mel_bins, frames] float32, and their mask int32.
        """
        import torch

        lengths = [self.sizes.frames((1, 1, count)) for count in grids[:, 2].tolist()]
        whole = self._whole if self.sizes.behind or self.sizes.always else max(lengths, default=0)
        features = torch.empty(len(lengths), whole, self.sizes.mel_bins)
        mask = torch.zeros(len(lengths), whole, dtype=torch.int32)
        parts = rows.split(grids[:, 2].tolist()) if lengths else ()
        for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            features[number] = max(float(part[:whole].max()) - _RANGE, _SILENCE)
            features[number, : len(part)] = part[:whole]
            mask[number, :length] = 1
        return {
            "input_features": features.transpose(1, 2).contiguous(),
            "feature_attention_mask": mask,
        }
