"""Small data for fuzzed runs, and the flags of a run over them."""

import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
from drawn_cells import GLOBAL_BATCH
from draws import DAMAGED_STEP, SAVE_INTERVAL, STEPS
from PIL import Image

from loongplug.data.sample_order import epoch_permutation
from loongplug.verify.tiny_processor import FixedImages, Kind, write_processor

ROWS = 40
LENGTH = 72  # tokens of a row, which 2 and 3 ranks, each with two chunks, and TP 4 divide
SEED = 1234  # Megatron's default
SIZES = ((32, 32), (32, 32), (64, 32), (64, 64))
# Two heads for TP 2 and four for TP 4, in as few numbers as that takes.
MODEL = (
    *("model.foundation.hidden_size=32", "model.foundation.ffn_hidden_size=32"),
    *("model.foundation.num_attention_heads=4", "model.foundation.num_query_groups=4"),
    *("model.foundation.kv_channels=16", "model.image_encoder.num_layers=2"),
    *("model.image_encoder.hidden_size=32", "model.image_encoder.ffn_hidden_size=32"),
)
QWEN = ("model.foundation.mrope_section=[4,2,2]", "model.image_encoder.deepstack_layers=[0]")
EXPERTS = ("model.foundation.num_experts=4", "model.foundation.expert_ffn_hidden_size=24")
KINDS: dict[str, Kind] = {
    "llava_tiny": "llava",
    "internvl_tiny": "internvl",
    "qwen2_5_omni_tiny": "qwen2_5_omni",
}
OF_MODEL = {
    "qwen3_vl_tiny": QWEN,
    "qwen3_vl_moe_tiny": (*QWEN, *EXPERTS),
    # Its last layer is not run: two are left for two stages.
    "llava_tiny": ("model.image_encoder.image_size=16", "model.image_encoder.num_layers=3"),
    "internvl_tiny": ("model.image_encoder.image_size=16",),
    "qwen2_5_omni_tiny": (  # heads that fill its decoder's width
        *("model.foundation.hidden_size=64", "model.foundation.mrope_section=[4,2,2]"),
        *("model.image_encoder.full_attention_layers=[1]", "model.audio_encoder.output_dim=64"),
        *("model.audio_encoder.hidden_size=32", "model.audio_encoder.ffn_hidden_size=32"),
    ),
}
SECONDS = (0.05, 0.3, 0.62)  # of sounds; the first gives one token


def place_of_damage() -> int:
    """The row that the third step meets, in the middle of its batch."""
    order = epoch_permutation(ROWS, seed=SEED, epoch=0)
    return int(order[GLOBAL_BATCH * (DAMAGED_STEP - 1) + 3])


def write_rows(folder: Path, *, rows: str, damage: str, hears: bool = False) -> Path:
    """A JSONL file with its images beside it, where the model hears some sounds; gives its path."""
    file = folder / f"{rows}-{damage or 'whole'}{'-heard' if hears else ''}.jsonl"
    if file.exists():
        return file
    rng = random.Random(rows)
    lines = []
    for number in range(ROWS):
        bad = damage if number == place_of_damage() else ""
        images = [_image(folder, rng) for _ in range(_count(rows, rng, bad=bad, number=number))]
        if bad == "media":
            images[0] = "images/missing.png"
        if bad == "pixels":
            images[0] = _damaged(folder, images[0])
        row = _row(images, rng)
        if hears and rng.random() < 0.5:
            row["messages"][0]["content"].insert(0, {"type": "audio", "audio": _sound(folder, rng)})
        lines.append("{" if bad == "row" else json.dumps(row))
    part = file.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n")
    part.rename(file)
    return file


def base_flags(folder: Path, *, model: str = "qwen3_vl_tiny") -> list[str]:
    """Of every fuzzed run of a model, less its data."""
    kind = KINDS.get(model, "qwen3_vl")
    processor = folder / f"processor-{kind}"
    if not processor.exists():
        write_processor(processor, kind, fixed=FixedImages(side=16))  # few tokens an image
    return [
        *("--model-name", model, "--training-phase", "sft", "--device", "cpu", *MODEL),
        *OF_MODEL[model],
        *("--tokenizer-model", str(processor), "--seq-length", str(LENGTH)),
        *("--micro-batch-size", "2", "--global-batch-size", str(GLOBAL_BATCH)),
        *("--lr", "1e-2", "--lr-decay-style", "constant", "--train-iters", str(STEPS)),
        *("--save-interval", str(SAVE_INTERVAL), "--log-interval", "1", "--eval-iters", "0"),
    ]


def _count(rows: str, rng: random.Random, *, bad: str, number: int) -> int:
    counts = {"text": (0,), "mixed": (0, 0, 1, 2, 3), "many": (3, 4, 5, 6), "lone": (0,)}
    count = rng.choice(counts[rows])
    if rows == "lone" and number == place_of_damage():
        count = 1
    return max(count, 1) if bad in ("media", "pixels") else count


def _row(images: list[str], rng: random.Random) -> dict[str, Any]:
    question = {"type": "text", "text": "Read"}
    shown = [{"type": "image", "image": each} for each in images]
    answer = "".join(str(rng.randrange(10)) for _ in range(rng.randint(1, 6)))
    return {
        "messages": [
            {"role": "user", "content": [*shown, question]},
            {"role": "assistant", "content": answer},
        ]
    }


def _image(folder: Path, rng: random.Random) -> str:
    width, height = rng.choice(SIZES)
    number = rng.randrange(8)
    name = f"images/{number}-{width}x{height}.png"
    if not (folder / name).exists():
        (folder / "images").mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState([number, width, height]).randint(256, size=(height, width))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
    return name


def _sound(folder: Path, rng: random.Random) -> str:
    seconds = rng.choice(SECONDS)
    number = rng.randrange(4)
    name = f"sounds/{number}-{seconds}.wav"
    if not (folder / name).exists():
        (folder / "sounds").mkdir(parents=True, exist_ok=True)
        noise = np.random.RandomState(number).randint(-8000, 8000, size=round(seconds * 16_000))
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(noise.astype("<i2").tobytes())
    return name


def _damaged(folder: Path, image: str) -> str:
    """A copy that ends in the middle; its header is right."""
    name = image.replace(".png", "-damaged.png")
    whole = (folder / image).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    return name
