"""``loongplug eval`` on a tiny random model of LLaVA's kind."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from random_models import saved_model
from transformers import CLIPImageProcessorPil, LlavaProcessor

from loongplug.data.processor_folder import load_processor
from loongplug.evaluate.command import evaluate
from loongplug.evaluate.generation import generate_answers, load_model
from loongplug.evaluate.questions import read_questions

MAX_NEW_TOKENS = 6
SIZES = [(32, 32), (64, 32), (32, 96)]  # width, height: all become 16 tokens


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("llava"), "llava_tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with no to three images, and one that asks twice."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = []
    for number, images in enumerate([[0], [], [1, 2, 0], [2]]):
        content: list[dict[str, str]] = [{"type": "image", "image": f"{i}.png"} for i in images]
        content.append({"type": "text", "text": "Read the digits. " * (1 + number % 3)})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if number == 3:
            messages += [{"role": "assistant", "content": "31"}, {"role": "user", "content": "+"}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": "?"}]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def greedy_by_transformers(model_folder: Path, data: Path) -> list[str]:
    """One question at a time, by the model's own processor; an end behind earlier answers."""
    model = load_model(model_folder, device="cpu")
    tokenizer = load_processor(model_folder).tokenizer
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil.from_pretrained(str(model_folder)),
        tokenizer=tokenizer,
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    answers = []
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"][:-1]
        parts = [part for part in messages[0]["content"] if part["type"] == "image"]
        pictures = [Image.open(data.parent / part["image"]).convert("RGB") for part in parts]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = text.replace("ASSISTANT: 31 ", "ASSISTANT: 31</s> ")
        inputs = processor(text=text, images=pictures or None, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = made[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


def test_answers_are_those_of_transformers(model_folder: Path, data: Path) -> None:
    expected = greedy_by_transformers(model_folder, data)
    assert len(set(expected)) > 2, expected  # else this test sees little
    processor = load_processor(model_folder)
    questions = read_questions(data, processor, limit=None)
    assert [int((each.input_ids == 3).sum()) for each in questions] == [16, 0, 48, 16]
    answers = generate_answers(
        load_model(model_folder, device="cpu"),
        processor,
        questions=questions,
        batch_size=4,
        max_new_tokens=MAX_NEW_TOKENS,
        on_done=lambda _: None,
    )
    assert answers == expected


def test_a_processor_of_another_model_is_refused(tmp_path: Path, data: Path) -> None:
    saved_model(tmp_path, "llava_tiny")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "image_token_index": 7, "image_token_id": 7}))
    with pytest.raises(ValueError, match="image_token_id is 3 in the folder but 7 in the model"):
        evaluate(
            tmp_path,
            data,
            batch_size=1,
            max_new_tokens=1,
            limit=1,
            device="cpu",
            json_path=None,
        )
