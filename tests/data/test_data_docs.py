"""Every sample in docs/data.md is read as it stands there."""

import json
import re
from pathlib import Path

from audio_folders import noise, write_qwen2_audio, write_wav
from bytes_tokenizer import with_bytes
from qwen_templates import QWEN3
from surveyed import media_in

from loongplug.data.dataset import ChatDataset
from loongplug.data.processor_folder import load_processor

DOCS = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_samples_in_the_docs_run(processor, tmp_path, write_rows, write_image, write_video):
    for folder in ("images", "clip"):
        (tmp_path / folder).mkdir()
    for name in ("images/cat.jpg", "images/dog.jpg", *(f"clip/00{i}.jpg" for i in range(3))):
        write_image(name, height=64, width=64)
    write_video("clip.mp4", 20)
    rows = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.S)]
    assert [next(iter(row)) for row in rows] == [
        *("messages", "messages", "messages", "conversations", "id", "instruction", "query"),
        *("messages", "text", "text", "messages"),
    ]
    write_wav(tmp_path / "moo.wav", noise(16_000))
    hearing = load_processor(write_qwen2_audio(tmp_path / "hearing"))
    path = write_rows(*rows)
    media = []
    for index, row in enumerate(rows):
        phase = "pretrain" if "text" in row else "sft"
        taken = hearing if "moo.wav" in json.dumps(row) else processor
        taken = with_bytes(processor, QWEN3) if "tools" in row else taken
        dataset = ChatDataset(path, processor=taken, seq_length=500, training_phase=phase)
        assert dataset[index].loss_mask.sum() > 0
        media.append(len(media_in(dataset, index)))
    assert media == [3, 2, 1, 2, 1, 1, 2, 2, 0, 1, 1]
