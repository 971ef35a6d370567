"""Rows with videos against the processors and models of transformers."""

from collections.abc import Callable

import pytest
import torch
from image_units import media_of
from local_loader import local_loader
from video_reference import Family, Row, reference, row_of, video

from loongplug.data.dataset import ChatDataset

pytestmark = pytest.mark.quick


@pytest.fixture
def compare(write_rows) -> Callable[..., None]:
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
        microbatch = next(local_loader(dataset, micro_batch_size=len(rows)))
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
    family, compare, write_image, write_frames, fps, phase
):
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


@pytest.mark.parametrize("fps", [None, 1, 2, 3.7, 30])
@pytest.mark.parametrize(("frames", "file_fps"), [(40, 10), (33, 29.97), (7, 10), (3, 1), (2, 5)])
def test_files_of_videos_agree_with_transformers(
    family, compare, write_video, frames, file_fps, fps
):
    part = {"type": "video", "video": write_video("a.mp4", frames, fps=file_fps)}
    part |= {} if fps is None else {"fps": fps}
    compare(family, row_of([part, {"type": "text", "text": "Read the digits."}]))


def test_bad_videos_name_file_and_line(family, write_rows, write_image, write_frames):
    frames = write_frames("f", 2, height=32, width=32)
    other = write_image("other.png", height=32, width=33)
    thin = write_frames("thin", 2, height=2, width=500)
    rows = write_rows(
        row_of([video([*frames, other], 2)]),
        row_of([video([*frames, "gone.png"], 2)]),
        row_of([video(thin, 2)]),
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
            r"frame .*other.png is 32 x 33 pixels, but the video's first frame is 32 x 32",
            "no image file at .*gone.png",
            "the video of frame .*thin0.png cannot be used: .*aspect ratio",
        )
    ):
        with pytest.raises(ValueError, match=rf"rows\.jsonl:{index + 1}: .*{message}"):
            dataset[index]


def test_frames_that_change_while_in_use_are_noticed(
    processor, write_rows, write_image, write_frames
):
    rows = write_rows(row_of([video(write_frames("f", 2, height=32, width=32), 2)]))
    dataset = ChatDataset(rows, processor=processor, seq_length=64, training_phase="sft")
    loader = local_loader(dataset, micro_batch_size=1)
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
