"""Rows with videos against the processors and models of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_units import media_of, unit_of
from local_loader import local_loader
from PIL import ImageFile
from video_reference import Family, Row, reference, row_of, video

from loongplug.data.conversation import Video
from loongplug.data.dataset import ChatDataset
from loongplug.data.processor import Processor
from loongplug.data.video import VideoProcessor

WHERE = "rows.jsonl:4"

pytestmark = pytest.mark.quick


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
        loader = local_loader(
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
        assert media_of(microbatch).grids.tolist() == [g for one in expected for g in one["grids"]]
        assert torch.equal(
            media_of(microbatch).rows,
            torch.cat([one["pixels"] for one in expected]),
        )

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


def timestamps(dataset: ChatDataset, index: int) -> str:
    ids = dataset[index].input_ids
    return dataset.processor.tokenizer.decode(ids[ids != dataset.processor.video_token_id])


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


def test_ranks_without_images_decode_no_frame(
    processor: Processor,
    write_rows: Callable[..., Path],
    write_frames: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = write_rows(row_of([video(write_frames("f", 5, height=40, width=70), 2)]))
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded a frame"))
    loader = local_loader(
        dataset, micro_batch_size=1, dp_rank=0, dp_size=1, seed=None, with_images=False
    )
    microbatch = next(loader)
    assert unit_of(microbatch).media is None
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
        row_of([{"type": "video", "video": ["a.png"], "fps": 0}]),
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
        # What looks like a special token in text is one here.
        processor=replace(family.processor, special_texts=None),
        seq_length=64,
        training_phase="sft",
        video_style=family.style,
    )
    for index, message in enumerate(
        (
            r"messages\[0\]\.content\[0\]\.fps is 0",
            'as frames has no "fps"',
            "a part of type video has no path",
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
    loader = local_loader(
        dataset, micro_batch_size=1, dp_rank=0, dp_size=1, seed=None, with_images=True
    )
    next(loader)
    write_image("f1.png", height=32, width=64)
    with pytest.raises(
        ValueError,
        match=r"rows\.jsonl:1: the frames of the video of frame .*f0.png are of different sizes",
    ):
        next(loader)
    write_image("f0.png", height=32, width=64)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*\[\[1, 2, 4\]\].*\[\[1, 2, 2\]\]"):
        next(loader)
