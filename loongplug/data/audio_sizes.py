"""How long a sound is at each step of its way: samples, frames, states of an encoder, tokens."""

from dataclasses import dataclass

from loongplug.data.positions import Grid

SAMPLE_RATE = 16_000  # of a second; what all these encoders hear
HOP = 160  # samples from one frame to the next


@dataclass(frozen=True, kw_only=True)
class AudioSizes:
    """How a model cuts sounds, given by its kind of encoder. Lengths are in frames of 10 ms.

    ``behind`` frames stand behind a sound's last one: the first convolutions read what silence
    sounds like. With ``always``, every sound is filled up to so many frames. A state is made of two
    frames, and a token of one state, or of two that are averaged where ``pooled``.
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
