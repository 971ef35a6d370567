"""What is kept of a recorded run: numbers in ``recording.json``, and whole tensors beside it.

These lie in one safetensors file for each kind, under their Hugging Face names.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor

FILE = "recording.json"

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
        data = dataclasses.asdict(self)
        del data["folder"]
        (self.folder / FILE).write_text(json.dumps(data) + "\n", encoding="utf-8")

    def kind(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind, read as they are looked at."""
        return load_file(self.folder / tensor_file(kind))


def read_recording(folder: Path) -> Recording:
    """Read what :meth:`Recording.write` wrote."""
    data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return TypeAdapter(Recording).validate_python({**data, "folder": folder})


def tensor_file(kind: str) -> str:
    """The name of the file of a kind."""
    return f"{kind}.safetensors"
