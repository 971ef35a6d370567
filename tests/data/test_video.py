"""Rows with videos against the processors and models of transformers."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
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

from loongplug.data.conversation import Video
from loongplug.data.dataset import ChatDataset
from loongplug.data.loader import MicrobatchLoader
from loongplug.data.media import MediaLoader
from loongplug.data.processor import Processor, load_processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle, patch_times

Row = dict[str, Any]
Content = list[dict[str, Any]]

TOKENS_PER_SECOND = 25  # enough for steps above and below one at the rates tried here
BLOCKS = VideoStyle(timestamps=False, tokens_per_second=TOKENS_PER_SECOND)
WHERE = "rows.jsonl:4"

pytestmark = pytest.mark.quick

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


@pytest.fixture(scope="module", params=["timestamps", "blocks"])
def family(request: pytest.FixtureRequest, processor: Processor, block_processor: Processor) -> Any:
    timestamps = request.param == "timestamps"
    chosen = processor if timestamps else block_processor
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


def read_frames(folder: Path, names: list[str]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(folder / name).convert("RGB")) for name in names])


def reference(family: Family, row: Row, folder: Path) -> dict[str, Any]:
    """What transformers makes of the row, with the patches in the order of their tokens."""
    parts = [p for m in row["messages"] if isinstance(m["content"], list) for p in m["content"]]
    images = [Image.open(folder / p["image"]).convert("RGB") for p in parts if p["type"] == "image"]
    videos = [p for p in parts if p["type"] == "video"]
    text = family.theirs.apply_chat_template(row["messages"], tokenize=False)
    features = family.theirs(
        text=[text],
        images=images or None,
        videos=[read_frames(folder, p["video"]) for p in videos] or None,
        video_metadata=[
            {
                "fps": p["fps"],
                "total_num_frames": len(p["video"]),
                "frames_indices": list(range(len(p["video"]))),
            }
            for p in videos
        ],
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


@pytest.fixture
def compare(write_rows: Callable[..., Path]) -> Callable[..., None]:
    """Asks for transformers' tokens, positions, grids and pixels, for rows in one microbatch."""

    def check(family: Family, *rows: Row, phase: str = "sft") -> None:
        path = write_rows(*rows)
        dataset = ChatDataset(
            path,
            processor=family.processor,
            seq_length=2048,
            training_phase=phase,
            video_style=family.style,
        )
        loader = MicrobatchLoader(
            dataset,
            micro_batch_size=len(rows),
            dp_rank=0,
            dp_size=1,
            seed=None,
            with_images=True,
        )
        microbatch = next(loader)
        expected = [reference(family, row, path.parent) for row in rows]
        for index, one in enumerate(expected):
            length = len(one["input_ids"])
            assert dataset[index].input_ids.tolist() == one["input_ids"]
            assert microbatch.input_ids[index, :length].tolist() == one["input_ids"]
            assert microbatch.position_ids[:, index, :length].tolist() == one["position_ids"]
        assert microbatch.vision is not None
        assert microbatch.vision.grid_thw.tolist() == [g for one in expected for g in one["grids"]]
        assert torch.equal(microbatch.vision.pixels, torch.cat([one["pixels"] for one in expected]))

    return check


@pytest.mark.parametrize("phase", ["sft", "pretrain"])
@pytest.mark.parametrize("fps", [1, 2, 2.5, 0.7])
def test_text_images_and_videos_agree_with_transformers(
    family: Family,
    compare: Callable[..., None],
    write_image: Callable[..., str],
    write_frames: Callable[..., list[str]],
    fps: float,
    phase: str,
) -> None:
    small = {"type": "image", "image": write_image("a.png", height=32, width=64)}
    tall = {"type": "image", "image": write_image("b.png", height=100, width=45, seed=1)}
    long = write_frames("long", 7, height=40, width=70)
    short = write_frames("short", 4, height=64, width=32)
    pair = write_frames("pair", 2, height=33, width=33)
    text = {"type": "text", "text": "Read the digits."}
    compare(
        family,
        row_of(
            [small, text, video(long, fps), tall, video(short, 30), text],
            [video(pair, fps), video(short, fps), small, text],
        ),
        row_of([text, video(long, fps)], [text]),
        row_of([tall, text]),
        phase=phase,
    )


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
@pytest.mark.parametrize(
    ("height", "width"),
    [(32, 32), (41, 77), (20, 200), (9, 12), (300, 700)],
)
def test_the_grid_from_the_headers_is_transformers_grid(
    family: Family,
    tmp_path: Path,
    write_frames: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    height: int,
    width: int,
) -> None:
    """Few pixels in all, so that Qwen3-VL's limits depend on the number of frames."""
    names = write_frames("f", count, height=height, width=width)
    theirs = family.theirs.video_processor(
        [read_frames(tmp_path, names)],
        do_sample_frames=False,
        size={"shortest_edge": 8 * 32 * 32, "longest_edge": 40 * 32 * 32},
    )
    videos = VideoProcessor(family.processor, family.style)
    videos._loaded(where=WHERE).size = type(family.theirs.video_processor.size)(
        shortest_edge=8 * 32 * 32, longest_edge=40 * 32 * 32
    )
    one = Video(tuple(tmp_path / name for name in names), fps=2.0)
    pixels, grid = videos.patches(one, where=WHERE)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded a frame"))
    assert videos.grid(one, where=WHERE) == grid
    assert theirs["video_grid_thw"].tolist() == [list(grid)]
    assert torch.equal(pixels, theirs["pixel_values_videos"])


def test_limits_that_depend_on_the_number_of_frames_are_met(
    processor: Processor, tmp_path: Path, write_frames: Callable[..., list[str]]
) -> None:
    names = write_frames("f", 12, height=320, width=320)
    videos = VideoProcessor(processor, TIMESTAMPS)
    transform = videos._loaded(where=WHERE)
    transform.size = type(transform.size)(shortest_edge=2048, longest_edge=4 * 320 * 320)
    frames = tuple(tmp_path / name for name in names)
    grids = [videos.grid(Video(frames[:n], fps=1.0), where=WHERE) for n in (2, 4, 6, 12)]
    assert grids == [(1, 20, 20), (2, 20, 20), (3, 16, 16), (6, 10, 10)]


def test_frames_are_turned_upright(
    family: Family, tmp_path: Path, write_frames: Callable[..., list[str]]
) -> None:
    """Two frames of one size, one of them stored on its side."""
    names = write_frames("f", 3, height=33, width=95)
    upright = np.asarray(Image.open(tmp_path / names[1]))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = np.ascontiguousarray(upright.transpose(1, 0, 2)[::-1])
    Image.fromarray(turned).save(tmp_path / "turned.webp", lossless=True, exif=exif)
    videos = VideoProcessor(family.processor, family.style)
    straight = Video(tuple(tmp_path / name for name in names), fps=2.0)
    one = Video((straight.frames[0], tmp_path / "turned.webp", straight.frames[2]), fps=2.0)
    assert videos.grid(one, where=WHERE) == videos.grid(straight, where=WHERE) == (2, 2, 6)
    pixels, grid = videos.patches(one, where=WHERE)
    assert grid == (2, 2, 6)
    assert torch.equal(pixels, videos.patches(straight, where=WHERE)[0])


def test_one_frame_is_a_video_of_it_twice(
    family: Family,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    write_frames: Callable[..., list[str]],
) -> None:
    (name,) = write_frames("f", 1, height=40, width=70)
    path = write_rows(row_of([video([name], 2)]))
    dataset = ChatDataset(
        path,
        processor=family.processor,
        seq_length=64,
        training_phase="sft",
        video_style=family.style,
    )
    tokens = dataset.processor.tokenizer.convert_ids_to_tokens(dataset[0].input_ids)
    assert tokens.count("<|video_pad|>") == 2
    assert ("▁seconds" in tokens) == family.style.timestamps
    videos = VideoProcessor(family.processor, family.style)
    once, twice = (Video((tmp_path / name,) * count, fps=2.0) for count in (1, 2))
    assert dataset[0].grids == (videos.grid(twice, where=WHERE),)
    assert torch.equal(videos.patches(once, where=WHERE)[0], videos.patches(twice, where=WHERE)[0])


def test_times_are_in_the_middle_of_a_patch() -> None:
    assert patch_times(5, fps=2.5, temporal_patch_size=2) == pytest.approx([0.2, 1.0, 1.6])
    assert patch_times(1, fps=2.0, temporal_patch_size=2) == [0.0]
    assert patch_times(4, fps=1.0, temporal_patch_size=3) == [1.0, 3.0]


def timestamps(dataset: ChatDataset, index: int) -> str:
    ids = dataset[index].input_ids
    return dataset.processor.tokenizer.decode(ids[ids != dataset.processor.video_token_id])


def test_timestamps_are_no_part_of_the_answer(
    processor: Processor, write_rows: Callable[..., Path], write_frames: Callable[..., list[str]]
) -> None:
    frames = write_frames("f", 5, height=32, width=32)
    rows = write_rows(row_of([video(frames, 2.5)]))
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    assert timestamps(dataset, 0).count(" seconds>") == 3
    sample = dataset[0]
    trained = sample.labels[sample.loss_mask.astype(bool)]
    assert processor.tokenizer.decode(trained) == "31<|im_end|>"


def test_a_style_of_timestamps_is_the_default(
    processor: Processor, write_rows: Callable[..., Path], write_frames: Callable[..., list[str]]
) -> None:
    rows = write_rows(row_of([video(write_frames("f", 2, height=32, width=32), 0.7)]))
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    assert "<0.7 seconds><|vision_start|><|vision_end|>" in timestamps(dataset, 0)


@pytest.mark.parametrize("cache_bytes", [0, 40_000, 2**30])
def test_images_and_videos_come_in_order_whatever_is_cached(
    family: Family,
    tmp_path: Path,
    write_image: Callable[..., str],
    write_frames: Callable[..., list[str]],
    cache_bytes: int,
) -> None:
    def paths(names: list[str]) -> tuple[Path, ...]:
        return tuple(tmp_path / name for name in names)

    media = [
        tmp_path / write_image("a.png", height=32, width=64, seed=1),
        Video(paths(write_frames("x", 3, height=32, width=32)), fps=2.0),
        tmp_path / write_image("b.png", height=64, width=32, seed=2),
        Video(paths(write_frames("y", 4, height=32, width=64)), fps=1.0),
    ]
    media.append(Video(media[1].frames[::-1], fps=2.0))  # the same files are another video
    media.append(Video(media[1].frames, fps=9.0))  # the same pixels

    def fresh(size: int = 2**30) -> MediaLoader:
        videos = VideoProcessor(family.processor, family.style)
        return MediaLoader(family.processor, videos=videos, cache_bytes=size)

    alone = [fresh().load([medium], where=WHERE) for medium in media]
    assert not torch.equal(alone[1].pixels, alone[4].pixels)
    assert torch.equal(alone[1].pixels, alone[5].pixels)
    loader = fresh(cache_bytes)
    for order in ([0, 1, 2, 3], [3, 1, 3, 0, 4], [1, 1], [5, 4, 2, 0]):
        vision = loader.load([media[i] for i in order], where=WHERE)
        assert torch.equal(vision.pixels, torch.cat([alone[i].pixels for i in order]))
        assert torch.equal(vision.grid_thw, torch.cat([alone[i].grid_thw for i in order]))


def test_a_cached_video_is_decoded_once_and_anew_when_a_frame_changes(
    processor: Processor,
    tmp_path: Path,
    write_image: Callable[..., str],
    write_frames: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = tuple(tmp_path / name for name in write_frames("f", 4, height=32, width=32))
    loader = MediaLoader(processor, videos=VideoProcessor(processor, TIMESTAMPS))
    one = Video(frames, fps=2.0)
    before = loader.load([one, one], where=WHERE)
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded a frame"))
        assert torch.equal(loader.load([one], where=WHERE).pixels, before.pixels[:8])
    write_image("f2.png", height=32, width=32, seed=77)
    after = loader.load([one], where=WHERE)
    assert torch.equal(after.pixels[:4], before.pixels[:4])  # the first two frames
    assert not torch.equal(after.pixels[4:], before.pixels[4:8])


def test_ranks_without_images_decode_no_frame(
    processor: Processor,
    write_rows: Callable[..., Path],
    write_frames: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = write_rows(row_of([video(write_frames("f", 5, height=40, width=70), 2)]))
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded a frame"))
    loader = MicrobatchLoader(
        dataset, micro_batch_size=1, dp_rank=0, dp_size=1, seed=None, with_images=False
    )
    microbatch = next(loader)
    assert microbatch.vision is None
    assert int((microbatch.input_ids == processor.video_token_id).sum()) == 6


def test_bad_videos_name_file_and_line(
    family: Family,
    write_rows: Callable[..., Path],
    write_image: Callable[..., str],
    write_frames: Callable[..., list[str]],
) -> None:
    frames = write_frames("f", 2, height=32, width=32)
    other = write_image("other.png", height=32, width=33)
    thin = write_frames("thin", 2, height=2, width=500)
    no_rate = {"type": "video", "video": frames}
    rows = write_rows(
        row_of([{"type": "video", "video": "clip.mp4", "fps": 2}]),
        row_of([no_rate]),
        row_of([video([], 2)]),
        row_of([video([*frames, other], 2)]),
        row_of([video([*frames, "gone.png"], 2)]),
        row_of([video(thin, 2)]),
        row_of([video(frames, 2), {"type": "text", "text": "<|video_pad|>"}]),
        row_of([{"type": "text", "text": "<|video_pad|>"}]),
    )
    dataset = ChatDataset(
        rows,
        processor=family.processor,
        seq_length=64,
        training_phase="sft",
        video_style=family.style,
    )
    for index, message in enumerate(
        (
            "message 1: video 'clip.mp4' is one file",
            'message 1: .* None under "fps"',
            "message 1: .* at least one frame",
            r"frame .*other.png is 32 x 33 pixels, but the video's first frame is 32 x 32",
            "no image file at .*gone.png",
            "the video of frame .*thin0.png cannot be used: .*aspect ratio",
            "2 video tokens in the text for 1 videos",
            r"1 video tokens in the text for 0 videos.*remove <\|video_pad\|>",
        )
    ):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:{index + 1}: .*{message}"):
            dataset[index]


def test_frames_that_change_while_in_use_are_noticed(
    processor: Processor,
    write_rows: Callable[..., Path],
    write_image: Callable[..., str],
    write_frames: Callable[..., list[str]],
) -> None:
    rows = write_rows(row_of([video(write_frames("f", 2, height=32, width=32), 2)]))
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    loader = MicrobatchLoader(
        dataset, micro_batch_size=1, dp_rank=0, dp_size=1, seed=None, with_images=True
    )
    next(loader)
    write_image("f1.png", height=32, width=64)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the frames .* different sizes"):
        next(loader)
    write_image("f0.png", height=32, width=64)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*\[\[1, 2, 4\]\].*\[\[1, 2, 2\]\]"):
        next(loader)


def load_copy(
    processor: Processor, folder: Path, change: Callable[[Path], object]
) -> tuple[Processor, Path]:
    shutil.copytree(processor.folder, folder)
    change(folder)
    return load_processor(folder), folder


def one_video(tmp_path: Path, names: list[str]) -> Video:
    return Video(tuple(tmp_path / name for name in names), fps=2.0)


def test_a_folder_without_a_video_processor_refuses_videos_only(
    processor: Processor,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    write_frames: Callable[..., list[str]],
) -> None:
    frames = write_frames("f", 2, height=32, width=32)
    rows = write_rows(row_of([{"type": "image", "image": frames[0]}]), row_of([video(frames, 2)]))
    without, _ = load_copy(
        processor, tmp_path / "hf", lambda f: (f / "video_preprocessor_config.json").unlink()
    )
    dataset = ChatDataset(rows, processor=without, seq_length=64, training_phase="sft")
    assert len(dataset[0].grids) == 1
    message = r"rows\.jsonl:2: .* no video processor in .*hf: copy video_preprocessor_config\.json"
    with pytest.raises(ValueError, match=message):
        dataset[1]


def test_a_folder_written_by_transformers_5_gives_the_same(
    family: Family, tmp_path: Path, write_frames: Callable[..., list[str]]
) -> None:
    family.theirs.save_pretrained(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "video_preprocessor_config.json").exists()
    one = one_video(tmp_path, write_frames("f", 5, height=41, width=77))
    saved = VideoProcessor(load_processor(tmp_path / "saved"), family.style)
    pixels, grid = saved.patches(one, where=WHERE)
    assert saved.grid(one, where=WHERE) == grid
    expected = VideoProcessor(family.processor, family.style).patches(one, where=WHERE)
    assert (grid, pixels.tolist()) == (expected[1], expected[0].tolist())


def test_a_folder_of_qwen2_5_as_published_has_one_file_for_both(
    block_processor: Processor, tmp_path: Path, write_frames: Callable[..., list[str]]
) -> None:
    def change(folder: Path) -> None:
        (folder / "video_preprocessor_config.json").unlink()
        path = folder / "preprocessor_config.json"
        config = json.loads(path.read_text())
        del config["size"]
        path.write_text(json.dumps(config | {"min_pixels": 4096, "max_pixels": 9216}))

    published, folder = load_copy(block_processor, tmp_path / "hf", change)
    one = one_video(tmp_path, write_frames("f", 4, height=320, width=160))
    videos = VideoProcessor(published, BLOCKS)
    theirs = Qwen2VLVideoProcessor.from_pretrained(str(folder))(
        [read_frames(tmp_path, [frame.name for frame in one.frames])], do_sample_frames=False
    )
    pixels, grid = videos.patches(one, where=WHERE)
    assert theirs["video_grid_thw"].tolist() == [list(grid)]
    assert grid == videos.grid(one, where=WHERE) == (2, 8, 4)
    assert torch.equal(pixels, theirs["pixel_values_videos"])


def test_the_processor_of_another_family_is_refused(
    processor: Processor,
    block_processor: Processor,
    tmp_path: Path,
    write_frames: Callable[..., list[str]],
) -> None:
    one = one_video(tmp_path, write_frames("f", 2, height=32, width=32))
    for other, style, given, expected in (
        (processor, BLOCKS, "Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor"),
        (block_processor, TIMESTAMPS, "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"),
    ):
        message = rf"^{WHERE}: .* is a {given}, but this model takes a {expected}"
        with pytest.raises(ValueError, match=message):
            VideoProcessor(other, style).grid(one, where=WHERE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"patch_size": 14}', "patch_size is 14 for videos but 16 for images"),
        ('{"temporal_patch_size": 4}', "temporal_patch_size is 4 for videos but 2 for images"),
        ('{"merge_size": 1}', "merge_size is 1 for videos but 2 for images"),
    ],
)
def test_a_video_processor_that_does_not_fit_the_images_is_refused(
    processor: Processor,
    tmp_path: Path,
    write_frames: Callable[..., list[str]],
    content: str,
    message: str,
) -> None:
    name = "video_preprocessor_config.json"
    other, _ = load_copy(processor, tmp_path / "hf", lambda f: (f / name).write_text(content))
    one = one_video(tmp_path, write_frames("f", 2, height=32, width=32))
    with pytest.raises(ValueError, match=rf"^{WHERE}: .*{message}"):
        VideoProcessor(other, TIMESTAMPS).grid(one, where=WHERE)


def test_a_config_that_is_no_json_is_named(
    processor: Processor, tmp_path: Path, write_frames: Callable[..., list[str]]
) -> None:
    name = "video_preprocessor_config.json"
    other, _ = load_copy(processor, tmp_path / "hf", lambda f: (f / name).write_text("{"))
    one = one_video(tmp_path, write_frames("f", 2, height=32, width=32))
    with pytest.raises(ValueError, match=rf"^{WHERE}: .*{name} is not JSON"):
        VideoProcessor(other, TIMESTAMPS).grid(one, where=WHERE)
