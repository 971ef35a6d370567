"""``loongplug eval`` on questions about videos, for models with timestamps and without."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from random_models import saved_model
from transformers import AutoProcessor

from loongplug.evaluate.command import evaluate
from loongplug.evaluate.generation import load_model

MAX_NEW_TOKENS = 4


@pytest.fixture(scope="module", params=["qwen3_vl_tiny", "qwen2_5_vl_tiny"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """A model with timestamps, or one of blocks of tokens, to which positions matter."""
    near = "model.foundation.rotary_base=100.0"
    return saved_model(tmp_path_factory.mktemp("model"), request.param, near)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict[str, Any]]:
    """Questions about videos, an image and text, with file names relative to their folder."""
    folder = tmp_path_factory.mktemp("frames")
    generator = np.random.default_rng(0)

    def write(name: str, height: int, width: int) -> str:
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        return str(folder / name)

    frames = [write(f"f{i}.png", 32, 64) for i in range(8)]
    image = {"type": "image", "image": write("a.png", 64, 32)}
    text = {"type": "text", "text": "Read the digits."}
    contents = [
        [{"type": "video", "video": frames, "fps": 1.5}, text],
        [text],
        [image, {"type": "video", "video": frames[:3], "fps": 0.7}, text],
        [
            {"type": "video", "video": frames[2:4], "fps": 2},
            image,
            {"type": "video", "video": frames[3:], "fps": 4},
            text,
        ],
    ]
    return [{"messages": [{"role": "user", "content": content}]} for content in contents]


def greedy_by_hand(folder: Path, row: dict[str, Any]) -> str:
    """The answer by transformers' own processor, without batch, cache or generate()."""
    model, theirs = load_model(folder, device="cpu"), AutoProcessor.from_pretrained(str(folder))
    parts = row["messages"][0]["content"]
    videos = [part for part in parts if part["type"] == "video"]
    images = [Image.open(part["image"]) for part in parts if part["type"] == "image"]
    text = theirs.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
    inputs = theirs(
        text=[text],
        images=images or None,
        videos=[np.stack([np.asarray(Image.open(f)) for f in v["video"]]) for v in videos] or None,
        video_metadata=[
            {
                "fps": v["fps"],
                "total_num_frames": len(v["video"]),
                "frames_indices": list(range(len(v["video"]))),
            }
            for v in videos
        ],
        do_sample_frames=False,
        return_tensors="pt",
    )
    ids, kinds = inputs.pop("input_ids"), inputs.pop("mm_token_type_ids")
    inputs.pop("attention_mask")
    new: list[int] = []
    while len(new) < MAX_NEW_TOKENS and model.generation_config.eos_token_id not in new:
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits
        model.model.rope_deltas = None
        new.append(int(logits[0, -1].argmax()))
        ids = torch.cat((ids, torch.tensor([new[-1:]])), dim=1)
        kinds = torch.cat((kinds, torch.zeros(1, 1, dtype=kinds.dtype)), dim=1)
    return theirs.decode(new, skip_special_tokens=True)


def test_answers_are_those_of_transformers(
    model_folder: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    answers = [greedy_by_hand(model_folder, row) for row in rows]
    assert len(set(answers)) > 2, answers  # else this test sees little
    answered = [
        {"messages": [*row["messages"], {"role": "assistant", "content": answer}]}
        for row, answer in zip(rows, answers, strict=True)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in answered))
    share = evaluate(
        model_folder,
        data,
        batch_size=4,
        max_new_tokens=MAX_NEW_TOKENS,
        limit=None,
        device="cpu",
        json_path=None,
    )
    assert share == 1.0
