"""What transformers makes of rows with videos, and how the tests of videos write such rows."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata

from loongplug.data.media_loader import PixelBytes
from loongplug.data.processor import Processor
from loongplug.data.sample import Grid
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle

Row = dict[str, Any]
Content = list[dict[str, Any]]

TOKENS_PER_SECOND = 25  # enough for steps above and below one at the rates tried here
BLOCKS = VideoStyle(timestamps=False, tokens_per_second=TOKENS_PER_SECOND)

_TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family: our side, and the processor and model of transformers."""

    style: VideoStyle
    processor: Processor
    theirs: Any
    model: Any


def make_family(chosen: Processor, *, timestamps: bool) -> Family:
    """The processor of transformers from the same folder, and a tiny model without weights."""
    folder = str(chosen.folder)
    video = Qwen3VLVideoProcessor if timestamps else Qwen2VLVideoProcessor
    theirs = (Qwen3VLProcessor if timestamps else Qwen2_5_VLProcessor)(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=chosen.tokenizer,
        video_processor=video.from_pretrained(folder),
        chat_template=chosen.tokenizer.chat_template,
    )
    with torch.device("meta"):
        if timestamps:
            config = Qwen3VLConfig(
                text_config=_TEXT, vision_config=_VISION | {"deepstack_visual_indexes": []}
            )
            model = Qwen3VLModel(config)
        else:
            config = Qwen2_5_VLConfig(
                text_config=_TEXT, vision_config=_VISION | {"tokens_per_second": TOKENS_PER_SECOND}
            )
            model = Qwen2_5_VLModel(config)
    return Family(TIMESTAMPS if timestamps else BLOCKS, chosen, theirs, model)


def video(frames: list[str], fps: float) -> dict[str, Any]:
    return {"type": "video", "video": frames, "fps": fps}


def row_of(*turns: Content) -> Row:
    """A conversation in which every question, made of parts, is answered with 31."""
    messages = []
    for content in turns:
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "31"}]
    return {"messages": messages}


def decode_all(path: Path) -> Iterator[np.ndarray]:
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def frames_of(family: Family, part: dict[str, Any], folder: Path) -> tuple[np.ndarray, Any]:
    """The frames that transformers takes of a part's file, or all that it names; what they are."""
    named, fps = part["video"], part.get("fps")
    if not isinstance(named, str):
        frames = read_frames(folder, named)
        metadata = VideoMetadata(total_num_frames=len(frames), fps=fps)
        metadata.frames_indices = list(range(len(frames)))
        return frames, metadata
    import av

    frames = np.stack(list(decode_all(folder / named)))
    with av.open(str(folder / named)) as container:
        rate = float(container.streams.video[0].average_rate)
    metadata = VideoMetadata(total_num_frames=len(frames), fps=rate)
    indices = family.theirs.video_processor.sample_frames(metadata, fps=fps or 2)
    metadata.frames_indices = [int(index) for index in indices]
    return frames[metadata.frames_indices], metadata


def read_frames(folder: Path, names: list[str]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(folder / name).convert("RGB")) for name in names])


def reference(family: Family, row: Row, folder: Path) -> dict[str, Any]:
    """What transformers makes of the row, with the patches in the order of their tokens."""
    parts = [p for m in row["messages"] if isinstance(m["content"], list) for p in m["content"]]
    images = [Image.open(folder / p["image"]).convert("RGB") for p in parts if p["type"] == "image"]
    films = [frames_of(family, p, folder) for p in parts if p["type"] == "video"]
    text = family.theirs.apply_chat_template(row["messages"], tokenize=False)
    features = family.theirs(
        text=[text],
        images=images or None,
        videos=[frames for frames, _ in films] or None,
        video_metadata=[metadata for _, metadata in films],
        do_sample_frames=False,
        return_tensors="pt",
    )
    times = {"second_per_grid_ts": features.get("second_per_grid_ts")}
    positions, _ = family.model.get_rope_index(
        features["input_ids"],
        features["mm_token_type_ids"],
        image_grid_thw=features.get("image_grid_thw"),
        video_grid_thw=features.get("video_grid_thw"),
        **({} if family.style.timestamps else times),
    )
    pixels, grids = [], []
    place = {"image": 0, "video": 0}
    patches = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if name in features:
            sizes = features[f"{kind}_grid_thw"].prod(-1).tolist()
            patches[kind] = features[name].split(sizes)
    for part in parts:
        if (kind := part["type"]) in place:
            pixels.append(patches[kind][place[kind]])
            grids.append(features[f"{kind}_grid_thw"][place[kind]].tolist())
            place[kind] += 1
    return {
        "input_ids": features["input_ids"][0].tolist(),
        "position_ids": positions[:, 0].tolist(),
        "pixels": torch.cat(pixels),
        "grids": grids,
    }


def patches(videos: VideoProcessor, video: Any, *, where: str) -> tuple[torch.Tensor, Grid]:
    """The rows of values of a video, and their grid."""
    rows, grid = videos.coded(video, where=where)
    return PixelBytes.of_videos(videos.transform).decoded(rows, grid[1] * grid[2]), grid
