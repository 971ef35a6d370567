"""What is kept of a recorded run: numbers in one JSON file, whole tensors beside it.

A recording is a folder. ``recording.json`` has what was said of every step; tensors lie in one
safetensors file for each kind, under their Hugging Face names.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor

FILE = "recording.json"
FORMAT = 1

# Kinds of tensors that are kept once, after the last step. "room" is how large Adam's divisor has
# been in every step: what tells how far noise can have moved a parameter.
PARAMETERS, FIRST_MOMENT, SECOND_MOMENT, ROOM = "parameters", "exp_avg", "exp_avg_sq", "room"


def gradients_of(step: int) -> str:
    """The kind of a step's gradients; steps count from 0."""
    return f"gradients-{step}"


@dataclass(frozen=True)
class MicrobatchLoss:
    """A microbatch, named by the run's number of its first sample, and its loss."""

    first_sample: int
    samples: int  # a digest of their labels, wherever padding ends
    loss: float  # summed over tokens
    tokens: float  # that count in it


@dataclass(frozen=True)
class ApartNote:
    """A slice whose copies differ: in what, and how much beside the first one's largest value."""

    what: str
    name: str
    ranks: tuple[int, ...]  # all that hold the slice, the first of them being the measure
    error: float


@dataclass(frozen=True)
class RecordedStep:
    """What was said of one step."""

    learning_rate: float
    gradient_norms: tuple[float, ...]  # of every rank
    microbatches: tuple[MicrobatchLoss, ...]  # in the order of their samples
    apart: tuple[ApartNote, ...]


@dataclass(frozen=True)
class TensorNote:
    """Where a tensor belongs: module and part of it; whether its first axis counts experts."""

    module: str
    experts: bool


@dataclass(frozen=True)
class Recording:
    """A whole run; ``start`` has a digest of each weight before the first step."""

    folder: Path
    ranks: int
    steps: tuple[RecordedStep, ...]
    tensors: dict[str, TensorNote]
    start: dict[str, int]

    def write(self) -> None:
        """Write ``recording.json``, which comes last: with it the recording is whole."""
        data = dataclasses.asdict(self) | {"format": FORMAT}
        del data["folder"]
        (self.folder / FILE).write_text(json.dumps(data) + "\n", encoding="utf-8")

    def kind(self, kind: str) -> "KindOfTensors":
        """The tensors of one kind."""
        return KindOfTensors(self.folder / tensor_file(kind))


class KindOfTensors:
    """The tensors of one file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self.names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.to(torch.float32)


def read_recording(folder: Path) -> Recording:
    """Read what :meth:`Recording.write` wrote.

    Raises:
        ValueError: there is none, or one of another version.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}: the run did not come to its end")
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.pop("format") != FORMAT:
        raise ValueError(f"{path} was written by another version of loongplug verify")
    return TypeAdapter(Recording).validate_python({**data, "folder": folder})


def tensor_file(kind: str) -> str:
    """The name of the file of a kind."""
    return f"{kind}.safetensors"
