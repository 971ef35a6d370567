"""Sound files: how long they are, and their samples, of one channel and 16,000 a second.

WAV files of whole numbers (PCM) are read by the standard library. All else is read by PyAV, which
the extra ``video`` installs, and which also changes the rate of sounds of another one.
"""

import wave
from collections.abc import Iterator
from dataclasses import dataclass
from io import SEEK_END
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from loongplug.data.audio_sizes import SAMPLE_RATE
from loongplug.data.av_files import AvKind, imported_av, opened_stream
from loongplug.data.conversation import AudioClip
from loongplug.data.media_files import MediaFile, opened_media

# All that FFmpeg opens, by its names; a sound may be that of a video.
CONTAINERS = (
    *("wav", "w64", "mp3", "flac", "ogg", "aac", "aiff", "au"),
    *("mov", "matroska", "webm", "asf", "avi"),
)
_AUDIO = AvKind(
    name="audio",
    containers=CONTAINERS,
    without_av="is no WAV file of whole numbers with 16,000 samples a second, and PyAV, which reads"
    " all others, is not installed: pip install 'loongplug[video]', or convert the sound",
    damaged="is damaged or no sound of a kind that is read",
    cure="replace the file, or convert it to WAV",
)
_LEAST_RATE, _MOST_RATE = 1_000, 768_000  # samples of a second; no sound has others
_LOUDEST = 2.0**15  # of floating point numbers, where 1 is full: some have the scale of 16 bits
_AT_ONCE = 2**16  # samples of each channel that are read of a WAV file at a time


def audio_length(path: MediaFile, *, where: str, enough: int) -> int:
    """How many samples :func:`decode_audio` will give.

    Read from the header of a WAV file. Others are decoded, as their headers may be wrong: until
    there are more than ``enough``, for a sound that is too long anyway.

    Raises ValueError with ``where`` for a file that is missing, damaged or no sound.
    """
    with opened_media("audio", path, where=where, header=True) as file:
        header = _WavHeader.of(file, path, where=where)
    if header is not None:
        if header.rate != SAMPLE_RATE:
            imported_av(path, _AUDIO, where=where)  # better told now than when it is decoded
        return samples_at_16k(header.samples, rate=header.rate)
    counted, length = 0, 0
    with opened_stream(_AUDIO, path, where=where, header=True) as (container, stream):
        for frame in _frames(container, stream):
            counted += frame.samples
            length = samples_at_16k(counted, rate=frame.sample_rate)
            if length > enough:
                break
    return length


def decode_audio(clip: AudioClip, *, where: str) -> NDArray[np.float32]:
    """The sound's samples, [samples] float32: the mean of its channels, where 1 is full.

    Of another rate, the sound is resampled by FFmpeg with silence behind it, and cut to
    :func:`samples_at_16k`. Raises ValueError with ``where`` for a file that is missing, damaged
    or not as long as it was.
    """
    path = clip.path
    with opened_media("audio", path, where=where) as file:
        header = _WavHeader.of(file, path, where=where)
        if header is not None:
            _require_length(header.samples, clip, rate=header.rate, where=where)
            sound, rate = header.read(file), header.rate
    if header is None:
        sound, rate = _decoded(clip, where=where)
    if not (np.abs(sound) <= _LOUDEST).all():
        raise ValueError(
            f"{where}: audio {path} has samples that are not numbers, or are far above 1 (full"
            " scale): save it again."
        )
    if rate == SAMPLE_RATE:
        return sound
    return _resampled(sound, rate=rate, av=imported_av(path, _AUDIO, where=where))


def _decoded(clip: AudioClip, *, where: str) -> tuple[NDArray[np.float32], int]:
    """The mean of the channels, [samples], by PyAV, and the rate."""
    pieces, counted, rate = [np.zeros(0, np.float32)], 0, SAMPLE_RATE
    with opened_stream(_AUDIO, clip.path, where=where) as (container, stream):
        for frame in _frames(container, stream):
            counted, rate = counted + frame.samples, frame.sample_rate
            if samples_at_16k(counted, rate=rate) > clip.samples:
                break  # it is another file now
            pieces.append(_of_frame(frame))
    _require_length(counted, clip, rate=rate, where=where)
    return np.concatenate(pieces), rate


def _require_length(samples: int, clip: AudioClip, *, rate: int, where: str) -> None:
    if samples_at_16k(samples, rate=rate) != clip.samples:
        raise ValueError(
            f"{where}: audio {clip.path} has not the {clip.samples} samples that the text was"
            " written for: do not change sound files while they are in use."
        )


def samples_at_16k(samples: int, *, rate: int) -> int:
    """How many samples there are at 16,000 a second of so many at ``rate``, rounded up."""
    return -(-samples * SAMPLE_RATE // rate)


@dataclass(frozen=True)
class _WavHeader:
    """What a WAV file of whole numbers says of itself."""

    samples: int  # of each channel
    rate: int
    channels: int
    width: int  # bytes of a number
    start: int  # of the numbers in the file

    @classmethod
    def of(cls, file: BinaryIO, path: MediaFile, *, where: str) -> Self | None:
        """Read it; None for all other files; ValueError for a file that is cut off."""
        head = file.read(12)
        if not (head.startswith(b"RIFF") and head.endswith(b"WAVE")):
            return None
        file.seek(0)
        try:
            with wave.open(file) as sound:  # the file itself stays open
                found = cls(
                    samples=sound.getnframes(),
                    rate=sound.getframerate(),
                    channels=sound.getnchannels(),
                    width=sound.getsampwidth(),
                    start=file.tell(),  # the library stops reading where the samples begin
                )
        except (wave.Error, EOFError):  # floating point numbers, say, or damage: PyAV tells
            return None
        size = found.samples * found.channels * found.width
        if (held := file.seek(0, SEEK_END) - found.start) < size:
            raise ValueError(
                f"{where}: audio {path} is cut off: its header says {size} bytes of sound, but"
                f" {held} are there: replace the file."
            )
        if found.width > 4 or not _LEAST_RATE <= found.rate <= _MOST_RATE:
            raise ValueError(
                f"{where}: audio {path} has {8 * found.width} bits and {found.rate} samples a"
                f" second: expected up to 32 bits, and {_LEAST_RATE} to {_MOST_RATE}."
            )
        return found

    def read(self, file: BinaryIO) -> NDArray[np.float32]:
        """The mean of the channels, [samples]."""
        file.seek(self.start)
        size, left = self.channels * self.width, self.samples
        pieces = [np.zeros(0, np.float32)]
        while left:
            content = file.read(min(left, _AT_ONCE) * size)
            numbers = _whole_numbers(content, width=self.width)
            pieces.append(_mean(numbers.reshape(-1, self.channels).T))
            left -= len(pieces[-1])
        return np.concatenate(pieces)


def _whole_numbers(content: bytes, *, width: int) -> NDArray[Any]:
    """Of a WAV file, [numbers] uint8, int16 or int32, 24 bits as the upper three bytes."""
    if width != 3:
        return np.frombuffer(content, dtype={1: "u1", 2: "<i2", 4: "<i4"}[width])
    wide = np.zeros((len(content) // 3, 4), dtype=np.uint8)
    wide[:, 1:] = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3)
    return wide.view("<i4")[:, 0]


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """The stream's frames in order; ValueError where their rate changes or is none."""
    rate = None
    for frame in container.decode(stream):
        rate = rate or frame.sample_rate
        if frame.sample_rate != rate or not _LEAST_RATE <= rate <= _MOST_RATE:
            raise ValueError(f"{frame.sample_rate} samples a second behind {rate}")
        yield frame


def _of_frame(frame: Any) -> NDArray[np.float32]:
    values = frame.to_ndarray()
    if not frame.format.is_planar:  # the channels' numbers take turns
        values = values.reshape(-1, frame.layout.nb_channels).T
    return _mean(values)


def _mean(values: NDArray[Any]) -> NDArray[np.float32]:
    """Of [channels, samples], where 1 is full: of whole numbers, what their bits can hold."""
    if values.dtype == np.uint8:
        values = values.astype(np.float32) - 128
        full = 2.0**7
    else:
        full = 1.0 if values.dtype.kind == "f" else 2.0 ** (8 * values.dtype.itemsize - 1)
    with np.errstate(over="ignore"):  # what is infinite then is refused later
        scaled = values.astype(np.float32) / np.float32(full)
    mean: NDArray[np.float32] = scaled.mean(axis=0, dtype=np.float32)
    return mean


def _resampled(sound: NDArray[np.float32], *, rate: int, av: Any) -> NDArray[np.float32]:
    """At 16,000 samples a second, :func:`samples_at_16k` of them."""
    wanted = samples_at_16k(len(sound), rate=rate)
    if not wanted:
        return sound
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=SAMPLE_RATE)
    longer = np.pad(sound, (0, rate // 10))  # the filter gives nothing of what it has not passed
    frame = av.AudioFrame.from_ndarray(longer[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    made = [*resampler.resample(frame), *resampler.resample(None)]
    found = np.concatenate([part.to_ndarray()[0] for part in made])
    assert len(found) >= wanted, (len(found), wanted, rate)
    return found[:wanted]
