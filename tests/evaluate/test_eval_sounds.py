"""``loongplug eval`` on questions about sounds, for models that hear, one of which sees too."""

import json
import wave
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

RATE = 16_000
MAX_NEW_TOKENS = 4


def rows(folder: Path, *, sees: bool) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)

    def sound(name: str, seconds: float) -> dict[str, str]:
        noise = generator.integers(-9000, 9000, round(seconds * RATE)).astype("<i2")
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(noise.tobytes())
        return {"type": "audio", "audio": str(folder / name)}

    def image(name: str) -> dict[str, str]:
        pixels = generator.integers(0, 256, (32, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        return {"type": "image", "image": str(folder / name)}

    text = {"type": "text", "text": "Which digits do you hear?"}
    contents = [
        [sound("a.wav", 0.31), text],
        [text],
        [sound("b.wav", 1.2), sound("c.wav", 0.07), text],
    ]
    if sees:
        contents.append([image("a.png"), sound("d.wav", 0.5), text])
    return [{"messages": [{"role": "user", "content": content}]} for content in contents]


def greedy_by_hand(folder: Path, row: dict[str, Any]) -> str:
    """The answer by transformers' own processor, without batch, cache or generate()."""
    model, theirs = load_model(folder, device="cpu"), AutoProcessor.from_pretrained(str(folder))
    given = {"audio": [], "images": []}
    for part in row["messages"][0]["content"]:
        if part["type"] == "audio":
            with wave.open(part["audio"]) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
            given["audio"].append(samples.astype(np.float32) / 2**15)
        if part["type"] == "image":
            given["images"].append(Image.open(part["image"]))
    text = theirs.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
    media = {kind: each for kind, each in given.items() if each}
    inputs = dict(theirs(text=[text], **media, return_tensors="pt"))
    inputs = {name: each for name, each in inputs.items() if each is not None}
    answer: list[int] = []
    for _ in range(MAX_NEW_TOKENS):
        with torch.no_grad():
            token = int(model(**inputs).logits[0, -1].argmax())
        if token == theirs.tokenizer.eos_token_id:
            break
        answer.append(token)
        more = torch.tensor([[token]])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
        ones = torch.ones_like(inputs["attention_mask"][:, :1])
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], ones], dim=1)
    found: str = theirs.tokenizer.decode(answer, skip_special_tokens=True)
    return found.strip()


@pytest.mark.parametrize("name", ["qwen2_audio_tiny", "qwen2_5_omni_tiny"])
def test_answers_are_those_of_transformers_by_hand(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = saved_model(tmp_path / "model", name)
    given = rows(tmp_path, sees="omni" in name)
    answers = [greedy_by_hand(folder, row) for row in given]
    assert len(set(answers)) > 1  # else nothing would be seen
    data = tmp_path / "rows.jsonl"
    lines = [
        {"messages": [*row["messages"], {"role": "assistant", "content": answer or "none"}]}
        for row, answer in zip(given, answers, strict=True)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    predictions = tmp_path / "predictions.jsonl"
    evaluate(
        folder,
        data,
        batch_size=len(lines),
        max_new_tokens=MAX_NEW_TOKENS,
        limit=None,
        device="cpu",
        predictions=predictions,
        json_path=None,
    )
    found = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [each["prediction"].strip() for each in found] == answers
