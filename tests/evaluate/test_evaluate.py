"""``loongplug eval`` on a tiny random model: its answers are noise, but they are its own."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from random_models import saved_model

from loongplug.data.data_options import PixelLimits, RowAccess
from loongplug.data.processor_folder import load_processor
from loongplug.evaluate.command import evaluate
from loongplug.evaluate.generation import generate_answers, load_model
from loongplug.evaluate.questions import read_questions

MAX_NEW_TOKENS = 6
SIZES = [(32, 32), (64, 32), (32, 96), (64, 64)]  # width, height: 1, 2, 3 and 4 tokens


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = saved_model(tmp_path_factory.mktemp("model"), "qwen3_vl_tiny")
    file = folder / "generation_config.json"
    sampled = {"temperature": 0.7, "do_sample": True}  # as published models have it; to be ignored
    file.write_text(json.dumps(json.loads(file.read_text()) | sampled))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Six rows: none to three images, prompts of very different lengths."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = []
    for number, images in enumerate([[0], [], [1, 2, 3], [3], [], [2, 0]]):
        text = "Read the digits. " * (1 + number % 3)
        content = [{"type": "image", "image": f"{i}.png"} for i in images]
        row = {
            "messages": [
                {"role": "user", "content": [*content, {"type": "text", "text": text}]},
                {"role": "assistant", "content": "?"},
            ]
        }
        if number:
            row["task"] = "picture" if images else "text"
        rows.append(row)
    write_rows(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl"


def write_rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


run = partial(
    evaluate,
    batch_size=4,
    max_new_tokens=MAX_NEW_TOKENS,
    limit=None,
    device="cpu",
    json_path=None,
)


def answers_of(model_folder: Path, data: Path, *, batch_size: int) -> list[str]:
    model = load_model(model_folder, device="cpu")
    processor = load_processor(model_folder)
    questions = read_questions(data, processor, limit=None)
    done: list[int] = []
    answers = generate_answers(
        model,
        processor,
        questions=questions,
        batch_size=batch_size,
        max_new_tokens=MAX_NEW_TOKENS,
        on_done=done.append,
    )
    assert sum(done) == len(questions)
    return answers


def test_batches_answer_as_single_questions_do(model_folder, data):
    expected = answers_of(model_folder, data, batch_size=1)
    assert len(set(expected)) > 3, expected  # else this test sees little
    assert answers_of(model_folder, data, batch_size=6) == expected
    assert answers_of(model_folder, data, batch_size=4) == expected


def test_scores_are_printed_and_written(model_folder, data, capsys):
    answers = answers_of(model_folder, data, batch_size=6)
    rows = read_rows(data)
    for number in (0, 1, 2, 4):
        rows[number]["messages"][-1]["content"] = f" {answers[number]}\n"
    right = data.with_name("right.jsonl")
    write_rows(right, rows)
    metrics = right.with_name("metrics.json")
    of_a_run = dict.fromkeys(("loss_first", "loss_last", "tokens_per_second", "train_seconds"), 4.0)
    metrics.write_text(json.dumps({**of_a_run, "iterations": 8}))
    predictions = right.with_name("predictions.jsonl")
    score = run(model_folder, right, json_path=metrics, predictions=predictions)
    assert score == pytest.approx(4 / 6)
    output = capsys.readouterr().out
    assert "evaluating: 6/6" in output
    lines = [line.replace("│", " ").split() for line in output.splitlines()]
    assert ["all", "4", "6", "66.7%"] in lines
    assert ["picture", "1", "3", "33.3%"] in lines
    assert ["text", "2", "2", "100.0%"] in lines
    assert f"{right}:4: {answers[3].strip()!r} instead of '?'" in output
    assert "wrong answers (2 of 2)" in output
    written = json.loads(metrics.read_text())
    assert written.pop("eval_seconds") > 0
    assert written == {
        **of_a_run,
        "iterations": 8,
        "exact_match": pytest.approx(4 / 6),
        "scores_per_task": {"picture": pytest.approx(1 / 3), "text": 1.0},
        "eval_samples": 6,
    }
    first, *_, last = read_rows(predictions)
    assert first == {
        "row": f"{right}:1",
        "task": None,
        "question": "Read the digits. ",
        "answer": f" {answers[0]}\n",
        "prediction": answers[0],
        "score": 1.0,
    }
    assert (last["row"], last["task"], last["score"]) == (f"{right}:6", "picture", 0.0)


def test_what_cannot_be_scored_is_known_before_the_work(model_folder, data, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the right answer '\?' .* no number"):
        run(model_folder, data, metric="number")
    assert "evaluating" not in capsys.readouterr().out


def test_the_limit_takes_the_first_rows(model_folder, data, tmp_path):
    run(model_folder, data, limit=2, json_path=tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text())["eval_samples"] == 2


def test_a_folder_neither_runs_code_nor_fetches_kernels(model_folder, tmp_path, monkeypatch):
    """Who would be asked for leave says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    named = {"_attn_implementation": "kernels-community/flash-attn"}
    (folder / "config.json").write_text(
        json.dumps(config | named | {"vision_config": config["vision_config"] | named})
    )
    model = load_model(folder, device="cpu")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"
    own = {"AutoConfig": "own.C", "AutoModelForImageTextToText": "own.M"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "odd", "auto_map": own}))
    with pytest.raises(ValueError, match=r"cannot be loaded: .* contains custom code"):
        load_model(folder, device="cpu")
    assert not ran.exists()


def test_images_are_looked_for_in_the_media_root(model_folder, data, tmp_path):
    elsewhere = tmp_path / "rows.jsonl"
    elsewhere.write_text(data.read_text())
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no image file at .*0.png"):
        run(model_folder, elsewhere)
    run(model_folder, elsewhere, access=RowAccess(media_root=data.parent), limit=1)


def test_what_is_wrong_is_said_in_a_sentence(model_folder, data, tmp_path):
    with pytest.raises(ValueError, match=r"No config.json in"):
        run(tmp_path, data)
    with pytest.raises(ValueError, match="No data file at"):
        run(model_folder, tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        run(model_folder, tmp_path / "empty.jsonl")
    write_rows(tmp_path / "open.jsonl", [{"messages": [{"role": "user", "content": "Read"}]}])
    with pytest.raises(ValueError, match=r"open.jsonl:1: the last message is the user's"):
        run(model_folder, tmp_path / "open.jsonl")
    with pytest.raises(ValueError, match="--max-pixels 5 "):
        run(model_folder, data, pixel_limits=PixelLimits(max_pixels=5))
    with pytest.raises(ValueError, match="device 'tpu' is unknown"):
        run(model_folder, data, device="tpu")


def test_a_model_that_is_not_whole_gives_no_answers(model_folder, data, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model_folder, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model.language_model.norm.weight"):
        run(folder, data)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        run(folder, data)


def test_a_processor_of_another_model_is_refused(model_folder, data, tmp_path):
    folder = Path(shutil.copytree(model_folder, tmp_path / "other"))
    path = folder / "preprocessor_config.json"
    config = json.loads(path.read_text()) | {"patch_size": 14}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="patch_size is 14 in the folder but 16 in the model"):
        run(folder, data)
