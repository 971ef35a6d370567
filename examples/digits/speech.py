"""Speech of eSpeak NG in WAV files, for the demo's sounds.

How an utterance sounds depends a little on those that the library has spoken before. So a process
of its own speaks them all, in their order: the same utterances give the same files.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loongplug.data.media_sizes import SAMPLE_RATE
from loongplug.verify.tiny_rows import write_sound

_LOUDEST = 0.5  # of what 16 bits hold: voices differ more than speakers before a microphone do

# Of the library's C interface.
_SYNCHRONOUS = 2  # samples go to the callback before the call returns
_LEAVE_SIGNALS = 0x8000
_RATE, _PITCH = 1, 3  # numbers of parameters
_SEED = 1  # of noise in a voice; the library takes the time of day
_BY_CHARACTER, _UTF8 = 1, 1
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """A text, who speaks it, how fast, how high, and the file for it."""

    text: str
    voice: str  # accent+speaker by the names in the package, such as "en-us+f2"
    rate: int  # words in a minute
    pitch: int  # 0 to 99
    path: str  # in the folder of all


def speak(utterances: Sequence[Utterance], folder: Path) -> Iterator[Utterance]:
    """Write a WAV file of 16 bits and 16 kHz, one channel, for each; yield what is written.

    Raises ValueError where the package with the library is not installed.
    """
    try:
        import espeakng_loader  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "The demo's sounds are spoken by eSpeak NG, which is not installed: pip install"
            " 'loongplug[demo-audio]'."
        ) from error
    command = [sys.executable, "-P", __file__, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as asked:
            json.dump([asdict(utterance) for utterance in utterances], asked)
        for utterance, _ in zip(utterances, process.stdout, strict=False):
            yield utterance
    if process.returncode:
        raise RuntimeError(f"eSpeak NG ended with {process.returncode}.")


class _Library:
    """eSpeak NG, as the package brings it along."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_Synth.argtypes = [
            *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint),
            *(ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p),
        ]
        data = os.fsencode(espeakng_loader.get_data_path())
        self._rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _LEAVE_SIGNALS)
        if self._rate <= 0:
            raise RuntimeError(f"eSpeak NG cannot read its data in {data!r}.")
        self._chunks: list[NDArray[np.int16]] = []
        self._callback = _Callback(self._take)  # kept: the library does not
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: Any, count: int, _events: int | None) -> int:
        if samples and count:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0  # go on

    def samples(self, utterance: Utterance) -> NDArray[np.int16]:
        """The utterance at 16 kHz, [samples]."""
        self._require(self._library.espeak_SetVoiceByName(utterance.voice.encode()), utterance)
        for number, value in ((_RATE, utterance.rate), (_PITCH, utterance.pitch)):
            self._require(self._library.espeak_SetParameter(number, value, 0), utterance)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(_SEED))
        self._chunks.clear()
        text = utterance.text.encode()
        ended = self._library.espeak_Synth(
            text, len(text) + 1, 0, _BY_CHARACTER, 0, _UTF8, None, None
        )
        self._require(ended, utterance)
        return _resampled(np.concatenate(self._chunks), self._rate)

    @staticmethod
    def _require(ended: int, utterance: Utterance) -> None:
        if ended:
            raise RuntimeError(f"eSpeak NG answers {ended} to {utterance}.")


def _resampled(samples: NDArray[np.int16], rate: int) -> NDArray[np.int16]:
    """At 16 kHz and as loud as all others; what is above 8 kHz goes."""
    count = round(len(samples) * SAMPLE_RATE / rate)
    spectrum = np.fft.rfft(samples.astype(np.float64))[: count // 2 + 1]
    wave_form = np.fft.irfft(spectrum, count)
    wave_form *= _LOUDEST * np.iinfo(np.int16).max / np.abs(wave_form).max()
    return np.round(wave_form).astype(np.int16)


def _main() -> None:
    """Speak what standard input asks for into the folder named; say a line for each file."""
    library, folder = _Library(), Path(sys.argv[1])
    for asked in json.load(sys.stdin):
        utterance = Utterance(**asked)
        write_sound(folder / utterance.path, library.samples(utterance))
        print(utterance.path, flush=True)


if __name__ == "__main__":
    _main()
