"""Training on rows that mix videos, images and text."""

import json
import shutil
from pathlib import Path

import pytest
from compared_runs import first_weights, losses
from PIL import Image

from loongplug.verify.tiny_processor import write_processor


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """Eight rows: two videos and an image, one video, an image, or text alone."""
    folder = tmp_path_factory.mktemp("videos")
    write_processor(folder / "processor")

    def picture(shade: int, size: tuple[int, int]) -> str:
        name = f"{shade}_{size[0]}x{size[1]}.png"
        Image.linear_gradient("L").resize(size).point(lambda p: (p * shade) % 256).save(
            folder / name
        )
        return name

    def video(frames: int, size: tuple[int, int]) -> dict:
        names = [picture(shade + 1, size) for shade in range(frames)]
        return {"type": "video", "video": names, "fps": 2.0}

    def image(size: tuple[int, int]) -> dict:
        return {"type": "image", "image": picture(3, size)}

    media = [
        [video(4, (64, 32)), image((32, 64)), video(3, (32, 32))],
        [video(2, (32, 64))],
        [image((64, 64))],
        [],
    ]
    rows = []
    for number in range(8):
        question = [*media[number % 4], {"type": "text", "text": f"digits {number}"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{number} {number}"},
        ]
        rows.append(json.dumps({"messages": messages}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_videos_train_alike_in_another_layout(videos, tmp_path):
    processor = tmp_path / "processor"
    shutil.copytree(videos / "processor", processor)
    # The family's folders have one file for images and videos.
    (processor / "video_preprocessor_config.json").unlink()
    flags = [
        *("--model-name", "qwen2_5_vl_tiny", "--training-phase", "sft", "--device", "cpu"),
        *("--tokenizer-model", str(processor), "--seq-length", "96"),
        *("--train-data-path", str(videos / "rows.jsonl"), "--eval-iters", "0"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3"),
        *("--train-iters", "3", "--log-interval", "1"),
    ]
    flags += ["--load-hf", first_weights(flags, tmp_path / "hf")]
    alone = losses(flags)
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    spread = losses(flags, *layout, ranks=4)
    assert len(alone) == 3
    assert spread == pytest.approx(alone, rel=1e-5)
