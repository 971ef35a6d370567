"""Loading a processor's folder, and what AutoProcessor of transformers makes of ours."""

import json
import shutil
from pathlib import Path

import pytest
from digits.tasks import WORDS
from transformers import AutoTokenizer

from loongplug.checkpoint.hf_export import _end_and_pad_ids
from loongplug.data.processor import require_fit
from loongplug.data.processor_folder import load_processor
from loongplug.verify.tiny_processor import VOCAB_SIZE, build_tokenizer

pytestmark = pytest.mark.quick


def test_ids_that_the_models_yaml_carries(processor):
    """These numbers stand in configs: a change here must be made there."""
    assert processor.pad_token_id == 0
    assert processor.end_token_id == 2
    assert processor.token_ids["vision_start_token_id"] == 3
    assert processor.token_ids["vision_end_token_id"] == 4
    assert processor.token_ids["image_token_id"] == 5
    assert processor.token_ids["video_token_id"] == 6
    assert set(processor.token_ids.values()) == {3, 4, 5, 6}
    assert processor.end_token == "<|im_end|>"
    assert processor.vocab_size <= VOCAB_SIZE == 128
    assert (processor.vision.patch_size, processor.vision.temporal_patch_size) == (16, 2)
    assert (processor.vision.spatial_merge_size, processor.vision.patch_dim) == (2, 1536)


TOKENIZER = build_tokenizer(words=WORDS)


def test_the_export_keeps_loading_next_to_a_models_config(processor_folder, tmp_path):
    """A config.json of Qwen3-VL makes AutoTokenizer think of Qwen's own tokenizer class."""
    shutil.copytree(processor_folder, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    text = "<|im_start|>user\nRead the digits.<|im_end|>\n"
    ids = AutoTokenizer.from_pretrained(str(tmp_path / "hf")).encode(text)
    assert ids == TOKENIZER.encode(text)
    assert load_processor(tmp_path / "hf").token_ids["image_token_id"] == 5


@pytest.fixture
def folder(processor_folder, tmp_path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(processor_folder, tmp_path / "folder"))


def test_missing_folder_names_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"No tokenizer in .*gone.*tokenizer\.json"):
        load_processor(tmp_path / "gone")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (("tokenizer.json", "tokenizer_config.json"), "No tokenizer in .*tokenizer.json"),
        (("preprocessor_config.json",), "No image processor in .*preprocessor_config.json"),
        (("chat_template.jinja",), "has no chat template"),
    ],
)
def test_missing_files_are_named(folder, removed, message):
    for name in removed:
        (folder / name).unlink()
    with pytest.raises(ValueError, match=message):
        load_processor(folder)


def test_tokenizer_of_a_text_model_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|image_pad|>", "<|other|>"))
    with pytest.raises(ValueError, match=r"has no <\|image_pad\|>: the tokenizer of"):
        load_processor(folder)


def test_tokenizer_without_an_end_token_is_refused(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names no eos_token"):
        load_processor(folder)


FITTING = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "vocab_size": 128,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}


def test_a_model_of_other_numbers_is_refused_with_all_of_them(processor):
    require_fit(processor, **FITTING)
    with pytest.raises(ValueError, match="does not fit the model") as error:
        require_fit(processor, **FITTING | {"image_token_id": 151655, "vocab_size": 64})
    assert "image_token_id is 5 in the folder but 151655 in the model" in str(error.value)
    assert "the model's vocab_size is 64" in str(error.value)
    assert "patch_size" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in FITTING if name != "vocab_size"])
def test_every_number_is_compared(processor, name):
    with pytest.raises(ValueError, match=f"{name} is"):
        require_fit(processor, **FITTING | {name: 99})


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("image_std", [0.5, 0.0, 0.5], "image_std .* above 0"),
        ("image_std", [0.5, float("nan"), 0.5], "image_std"),
        ("image_std", [0.5], "image_std"),
        ("image_mean", [float("inf"), 0.5, 0.5], "image_mean .* three finite numbers"),
        ("image_mean", "half", "image_mean"),
        ("image_mean", [10**400, 0, 0], "image_mean"),
        ("rescale_factor", float("nan"), "rescale_factor nan"),
        ("rescale_factor", 0, "rescale_factor 0"),
    ],
)
def test_pixels_that_would_not_be_finite_are_refused(setting, value, said, folder):
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), setting: value}))
    with pytest.raises(ValueError, match=f"The image processor in {folder} has {said}"):
        load_processor(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("preprocessor_config.json", b"{"),
        ("tokenizer.json", b"{"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("config.json", b'{"model_type": "qwen3_vl", "text_config": 5}'),
    ],
)
def test_a_damaged_file_of_the_folder_is_an_error_of_the_folder(name, content, folder):
    (folder / name).write_bytes(content)
    said = rf"\.json in {folder}, or what stands beside it|{folder}/{name} is not JSON"
    with pytest.raises(ValueError, match=said):
        load_processor(folder)


def test_a_folders_own_code_is_not_run(folder, tmp_path, monkeypatch):
    """Nor is anybody asked for leave to run it, who here would say yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.T", "own.T"]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast as T\n"
    )
    for load in (load_processor, _end_and_pad_ids):
        with pytest.raises(ValueError, match="contains custom code"):
            load(folder)
    assert not (tmp_path / "ran").exists()
