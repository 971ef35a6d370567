"""Sound files: how long they are, and their samples, of one channel and 16,000 a second.

Python itself reads WAV files of whole numbers; PyAV, of the extra ``video``, all else.
"""

import wave
from collections.abc import Iterable, Iterator
from io import SEEK_END
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from loongplug.data.av_files import imported_av, opened_stream
from loongplug.data.conversation import AudioClip
from loongplug.data.media_files import MediaFile, opened_media
from loongplug.data.media_sizes import SAMPLE_RATE

_LEAST_RATE, _MOST_RATE = 1_000, 768_000  # samples of a second; no sound has others
_LOUDEST = 2.0**15  # of floating point numbers, where 1 is full: some have the scale of 16 bits
_AT_ONCE = 2**16  # samples of each channel that are read of a WAV file at a time


def audio_length(path: MediaFile, *, where: str, enough: int) -> int:
    """How many samples :func:`decode_audio` will give, up to ``enough`` and some; or ValueError."""
    with opened_media("audio", path, where=where, header=True) as file:
        wav = _wav(file, path, where=where)
    if wav is not None:
        if wav.getframerate() != SAMPLE_RATE:
            imported_av(path, where=where)  # better told now than when it is decoded
        return samples_at_16k(wav.getnframes(), rate=wav.getframerate())
    counted, length = 0, 0
    with opened_stream("audio", path, where=where, header=True) as (container, stream):
        for frame in _frames(container, stream):
            counted += frame.samples
            length = samples_at_16k(counted, rate=frame.sample_rate)
            if length > enough:
                break
    return length


def decode_audio(clip: AudioClip, *, where: str) -> NDArray[np.float32]:
    """The sound's samples, [samples] float32: the mean of its channels, where 1 is full.

    ValueError with ``where`` for a file that is missing, damaged or not as long as it was.
    """
    path = clip.path
    with opened_media("audio", path, where=where) as file:
        wav = _wav(file, path, where=where)
        if wav is not None:
            rate = wav.getframerate()
            _require_length(wav.getnframes(), clip, rate=rate, where=where)
            sound = _joined(_pieces(wav, file))
    if wav is None:
        sound, rate = _decoded(clip, where=where)
    if not (np.abs(sound) <= _LOUDEST).all():
        raise ValueError(
            f"{where}: audio {path} has samples that are not numbers, or are far above 1 (full"
            " scale): save it again."
        )
    if rate == SAMPLE_RATE:
        return sound
    return _resampled(sound, rate=rate, av=imported_av(path, where=where))


def _decoded(clip: AudioClip, *, where: str) -> tuple[NDArray[np.float32], int]:
    """The mean of the channels, [samples], by PyAV, and the rate."""
    pieces, counted, rate = [], 0, SAMPLE_RATE
    with opened_stream("audio", clip.path, where=where) as (container, stream):
        for frame in _frames(container, stream):
            counted, rate = counted + frame.samples, frame.sample_rate
            if samples_at_16k(counted, rate=rate) > clip.samples:
                break  # it is another file now
            values = frame.to_ndarray()
            if not frame.format.is_planar:  # the channels' numbers take turns
                values = values.reshape(-1, frame.layout.nb_channels).T
            pieces.append(_mean(values))
    _require_length(counted, clip, rate=rate, where=where)
    return _joined(pieces), rate


def _require_length(samples: int, clip: AudioClip, *, rate: int, where: str) -> None:
    if samples_at_16k(samples, rate=rate) != clip.samples:
        raise ValueError(
            f"{where}: audio {clip.path} has not the {clip.samples} samples that the text was"
            " written for: do not change sound files while they are in use."
        )


def samples_at_16k(samples: int, *, rate: int) -> int:
    """How many samples there are at 16,000 a second of so many at ``rate``, rounded up."""
    return -(-samples * SAMPLE_RATE // rate)


def _wav(file: BinaryIO, path: MediaFile, *, where: str) -> wave.Wave_read | None:
    """A WAV file of whole numbers; None for all other files; ValueError for one cut off."""
    try:
        wav = wave.Wave_read(file)  # the file itself stays open
    # Floating point numbers, say, or damage, such as a chunk that ends behind the file: PyAV tells.
    except (wave.Error, EOFError, RuntimeError):
        return None
    start = file.tell()  # the library stops reading where the samples begin
    width, rate = wav.getsampwidth(), wav.getframerate()
    size = wav.getnframes() * wav.getnchannels() * width
    if (held := file.seek(0, SEEK_END) - start) < size:
        raise ValueError(
            f"{where}: audio {path} is cut off: its header says {size} bytes of sound, but"
            f" {held} are there: replace the file."
        )
    if width > 4 or not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ValueError(
            f"{where}: audio {path} has {8 * width} bits and {rate} samples a second: expected up"
            f" to 32 bits, and {_LEAST_RATE} to {_MOST_RATE}."
        )
    file.seek(start)
    return wav


def _pieces(wav: wave.Wave_read, file: BinaryIO) -> Iterator[NDArray[np.float32]]:
    """The mean of the channels, [samples] each, of a file that is where its samples begin."""
    samples, channels, width = wav.getnframes(), wav.getnchannels(), wav.getsampwidth()
    for first in range(0, samples, _AT_ONCE):
        content = file.read(min(_AT_ONCE, samples - first) * channels * width)
        if width == 3:  # the upper three bytes of four
            wide = np.zeros((len(content) // 3, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3)
            content = wide.tobytes()
        numbers = np.frombuffer(content, dtype={1: "u1", 2: "<i2", 3: "<i4", 4: "<i4"}[width])
        yield _mean(numbers.reshape(-1, channels).T)


def _joined(pieces: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *pieces])


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """The stream's frames in order; ValueError where their rate changes or is none."""
    rate = None
    for frame in container.decode(stream):
        rate = rate or frame.sample_rate
        if frame.sample_rate != rate or not _LEAST_RATE <= rate <= _MOST_RATE:
            raise ValueError(f"{frame.sample_rate} samples a second behind {rate}")
        yield frame


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
