"""Small data for fuzzed runs, and the flags of a run over them."""

import json
from pathlib import Path
from typing import Any

from drawn_cells import GLOBAL_BATCH
from draws import DAMAGED_STEP, SAVE_INTERVAL, STEPS

from loongplug.data.sample_order import epoch_permutation
from loongplug.verify import tiny_rows
from loongplug.verify.tiny_processor import FixedImages, Kind, write_processor

ROWS = 40
LENGTH = 72  # tokens of a row, which 2 and 3 ranks, each with two chunks, and TP 4 divide
SEED = 1234  # Megatron's default
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


def place_of_damage() -> int:
    """The row that the third step meets, in the middle of its batch."""
    order = epoch_permutation(ROWS, seed=SEED, epoch=0)
    return int(order[GLOBAL_BATCH * (DAMAGED_STEP - 1) + 3])


def write_rows(folder: Path, *, rows: str, damage: str, hears: bool = False) -> Path:
    """Tiny rows with none, few or all of their images; gives the path of their JSONL file."""
    media = ("image", "audio") if hears else ("image",)
    source = folder / "-".join(media) / "train.jsonl"
    file = source.with_name(f"{rows}-{damage or 'whole'}.jsonl")
    if file.exists():
        return file
    if not source.exists():
        tiny_rows.write_rows(source.parent, samples=ROWS, media=media)
    lines = source.read_text().splitlines()
    for number, line in enumerate(lines):
        hit = number == place_of_damage()
        most = {"text": 0, "lone": 0, "mixed": 3 * (number % 2), "many": 6}[rows]
        if hit and (rows == "lone" or damage in ("media", "pixels")):
            most = max(most, 1)
        row = _row(json.loads(line), most, damage=damage if hit else "", folder=source.parent)
        lines[number] = "{" if hit and damage == "row" else json.dumps(row)
    part = file.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n")
    part.rename(file)
    return file


def _row(row: dict[str, Any], most: int, *, damage: str, folder: Path) -> dict[str, Any]:
    """A row with so many of its images, of which the first one is damaged."""
    images = [part for each in row["messages"] for part in each["content"] if "image" in part]
    for each in row["messages"]:
        if not isinstance(each["content"], str):
            each["content"] = [x for x in each["content"] if x not in images[most:]]
    if damage == "media":
        images[0]["image"] = "images/missing.png"
    if damage == "pixels":  # it ends in the middle; its header is right
        whole = (folder / images[0]["image"]).read_bytes()
        images[0]["image"] = images[0]["image"].replace(".png", "-damaged.png")
        (folder / images[0]["image"]).write_bytes(whole[: len(whole) // 2])
    return row


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
