"""Data of the runs: noise of the sizes that are asked for, a short question, a tiny tokenizer.

Made where the driver runs: nothing is downloaded. What is on an image does not matter to a clock.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from gpu_steps.sizes import ModelRun

_IMAGES_OF_A_SIDE = 4
_SAMPLES = 256
_MOST_PIXELS = 1024 * 1024
_PATCH = 16  # pixels, of the tiny processor
_QUESTION, _ANSWER = "count?", "1"


@dataclass(frozen=True, kw_only=True)
class Data:
    """A folder with ``train.jsonl`` and ``processor/``."""

    folder: Path

    @property
    def processor(self) -> Path:
        """Tokenizer, chat template and image processor."""
        return self.folder / "processor"

    @property
    def rows(self) -> Path:
        """The samples."""
        return self.folder / "train.jsonl"

    def flags(self, *, seq_length: int) -> tuple[str, ...]:
        """The training run's flags for it."""
        return (
            *("--tokenizer-model", str(self.processor), "--train-data-path", str(self.rows)),
            *("--seq-length", str(seq_length)),
        )

    def tokens_of_first(self, count: int) -> list[int]:
        """Tokens of the first samples, before padding."""
        from loongplug.data.dataset import ChatDataset
        from loongplug.data.processor_folder import load_processor

        dataset = ChatDataset(
            self.rows,
            processor=load_processor(self.processor),
            seq_length=2**30,
            training_phase="sft",
        )
        return [len(dataset[index]) for index in range(count)]


def data_of(run: ModelRun, *, folder: Path) -> Data:
    """The data of ``run`` below ``folder``, made where they are not there yet."""
    data = Data(folder=folder / f"images-{'-'.join(map(str, run.sides))}")
    if not data.rows.is_file():
        _write(data, sides=run.sides)
    return data


def grid_of(side: int) -> tuple[int, int, int]:
    """The patches of a square image, which is one frame."""
    return 1, side // _PATCH, side // _PATCH


def _write(data: Data, *, sides: tuple[int, ...]) -> None:
    import numpy as np
    from PIL import Image

    from loongplug.verify.tiny_processor import write_processor

    (data.folder / "images").mkdir(parents=True, exist_ok=True)
    write_processor(data.processor)
    _allow_large_images(data.processor)
    generator = np.random.default_rng(1234)
    for side in sides:
        for number in range(_IMAGES_OF_A_SIDE):
            noise = generator.integers(0, 256, size=(side, side, 3), dtype=np.uint8)
            Image.fromarray(noise).save(data.folder / _image(side, number), quality=90)
    rows = [json.dumps(_row(number, sides=sides)) + "\n" for number in range(_SAMPLES)]
    data.rows.write_text("".join(rows), encoding="utf-8")


def _allow_large_images(processor: Path) -> None:
    """The tiny processor would shrink them to 512 x 512."""
    path = processor / "preprocessor_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["size"]["longest_edge"] = _MOST_PIXELS
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _row(number: int, *, sides: tuple[int, ...]) -> dict[str, object]:
    image = _image(sides[number % len(sides)], number // len(sides) % _IMAGES_OF_A_SIDE)
    content = [{"type": "image", "image": image}, {"type": "text", "text": _QUESTION}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": _ANSWER},
        ]
    }


def _image(side: int, number: int) -> str:
    return f"images/{side}-{number}.jpg"
