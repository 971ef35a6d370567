"""``loongplug eval`` on tiny random models of each kind, by transformers' own processors."""

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
# Models with the media that their questions have. Positions matter to those with videos.
MODELS = {
    "qwen3_vl_tiny": ("image", "video"),
    "qwen2_5_vl_tiny": ("image", "video"),
    "llava_tiny": ("image",),
    "qwen2_audio_tiny": ("audio",),
    "qwen2_5_omni_tiny": ("image", "audio"),
}
Part = dict[str, Any]


def conversations(folder: Path, media: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """Questions with none to three media, and one after an earlier answer."""
    generator = np.random.default_rng(0)

    def image(name: str, height: int = 32, width: int = 64) -> Part:
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        return {"type": "image", "image": str(folder / name)}

    def sound(name: str, seconds: float) -> Part:
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(generator.integers(-9000, 9000, round(seconds * RATE)).astype("<i2"))
        return {"type": "audio", "audio": str(folder / name)}

    frames = [image(f"f{number}.png")["image"] for number in range(8)]

    def video(first: int, behind: int, fps: float) -> Part:
        return {"type": "video", "video": frames[first:behind], "fps": fps}

    contents: list[list[Part]] = [[]]
    if "image" in media:
        contents += [[image("a.png")], [image(f"{n}.png", 32, 32 * n) for n in (1, 2, 3)]]
    if "video" in media:
        contents += [[video(0, 8, 1.5)], [image("b.png", 64, 32), video(0, 3, 0.7)]]
        contents += [[video(2, 4, 2), image("c.png", 64, 32), video(3, 8, 4)]]
    if "audio" in media:
        contents += [[sound("a.wav", 0.31)], [sound("b.wav", 1.2), sound("c.wav", 0.07)]]
    if {*media} == {"image", "audio"}:
        contents += [[image("d.png"), sound("d.wav", 0.5)]]
    asked = {"type": "text", "text": "Read the digits."}
    found = [[{"role": "user", "content": [*content, asked]}] for content in contents]
    again = [{"role": "assistant", "content": "31"}, {"role": "user", "content": "+"}]
    return [*found, [*found[-1], *again]]


def greedy_by_hand(folder: Path, messages: list[dict[str, Any]]) -> str:
    """The answer by transformers' own processor, without batch, cache or generate()."""
    model, theirs = load_model(folder, device="cpu"), AutoProcessor.from_pretrained(str(folder))
    given: dict[str, list[Any]] = {"images": [], "audio": [], "videos": [], "video_metadata": []}
    for part in messages[0]["content"]:
        if part["type"] == "audio":
            with wave.open(part["audio"]) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
            given["audio"].append(samples.astype(np.float32) / 2**15)
        if part["type"] == "image":
            given["images"].append(Image.open(part["image"]))
        if part["type"] == "video":
            count = len(part["video"])
            given["videos"].append(np.stack([np.asarray(Image.open(f)) for f in part["video"]]))
            given["video_metadata"].append(
                {
                    "fps": part["fps"],
                    "total_num_frames": count,
                    "frames_indices": list(range(count)),
                }
            )
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = text.replace("ASSISTANT: 31 ", "ASSISTANT: 31</s> ")  # as LLaVA ends an earlier answer
    media: dict[str, Any] = {kind: each for kind, each in given.items() if each}
    if given["videos"]:
        media["do_sample_frames"] = False
    inputs = dict(theirs(text=[text], **media, return_tensors="pt"))
    inputs = {name: each for name, each in inputs.items() if each is not None}
    answer: list[int] = []
    while len(answer) < MAX_NEW_TOKENS and model.generation_config.eos_token_id not in answer:
        with torch.no_grad():
            answer.append(int(model(**inputs).logits[0, -1].argmax()))
        if hasattr(model, "model"):
            model.model.rope_deltas = None
        for name, more in (
            *(("input_ids", answer[-1]), ("attention_mask", 1), ("mm_token_type_ids", 0)),
        ):
            if name in inputs:
                column = torch.full_like(inputs[name][:, :1], more)
                inputs[name] = torch.cat((inputs[name], column), dim=1)
    found: str = theirs.tokenizer.decode(answer, skip_special_tokens=True)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    near = ("model.foundation.rotary_base=100.0",) if "video" in MODELS[name] else ()
    (tmp_path / "model").mkdir()
    folder = saved_model(tmp_path / "model", name, *near)
    asked = conversations(tmp_path, MODELS[name])
    answers = [greedy_by_hand(folder, messages) for messages in asked]
    assert len(set(answers)) > 2, answers  # else this test sees little
    lines = [
        {"messages": [*messages, {"role": "assistant", "content": answer or "none"}]}
        for messages, answer in zip(asked, answers, strict=True)
    ]
    data, predictions = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"max_new_tokens": MAX_NEW_TOKENS, "limit": None, "device": "cpu", "json_path": None}
    evaluate(folder, data, batch_size=4, predictions=predictions, **options)
    found = [json.loads(line)["prediction"] for line in predictions.read_text().splitlines()]
    assert [each.strip() for each in found] == [each.strip() for each in answers]


def test_a_processor_of_another_model_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path, "llava_tiny")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "image_token_index": 7, "image_token_id": 7}))
    options = {"max_new_tokens": 1, "limit": 1, "device": "cpu", "json_path": None}
    with pytest.raises(ValueError, match="image_token_id is 3 in the folder but 7 in the model"):
        evaluate(tmp_path, tmp_path / "none.jsonl", batch_size=1, **options)
