"""mRoPE positions against the reference in transformers, and by hand."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from loongplug.data.sample import Grid, mrope_position_ids
from loongplug.data.video import VideoStyle

pytestmark = pytest.mark.quick

TEXT, IMAGE, VIDEO = 1, 5, 6

# A picture among text: its kind and its merged grid.
Picture = tuple[int, Grid]

sides = st.integers(1, 5)
pictures = st.one_of(
    st.tuples(st.just(IMAGE), st.tuples(st.just(1), sides, sides)),
    st.tuples(st.just(VIDEO), st.tuples(st.integers(1, 4), sides, sides)),
)


def reference(
    ids: list[int], *, images: list[Grid], videos: list[Grid], merge: int
) -> list[list[int]]:
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge))
    )
    model.get_vision_position_ids = lambda *args, **kwargs: Qwen3VLModel.get_vision_position_ids(
        model, *args, **kwargs
    )
    types = [{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]
    positions, _ = Qwen3VLModel.get_rope_index(
        model,
        torch.tensor([ids]),
        torch.tensor([types]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )
    return positions[:, 0].tolist()


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 4), pictures), max_size=5),
    last=st.integers(0, 3),
    merge=st.sampled_from([1, 2, 3]),
)
def test_agrees_with_transformers(pieces: list[tuple[int, Picture]], last: int, merge: int) -> None:
    ids: list[int] = []
    grids: dict[int, list[Grid]] = {IMAGE: [], VIDEO: []}
    for text, (kind, (time, height, width)) in pieces:
        frames = time if kind == VIDEO else 1
        for _ in range(frames):  # each frame has its timestamp as text before it
            ids += [TEXT] * text + [kind] * (height * width)
        grids[kind].append((time, height * merge, width * merge))
    ids += [TEXT] * (last if ids else last + 1)
    ours = mrope_position_ids(
        np.array(ids),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grids=grids[IMAGE],
        video_grids=grids[VIDEO],
        spatial_merge_size=merge,
    )
    assert ours.dtype == np.int64
    assert ours.tolist() == reference(ids, images=grids[IMAGE], videos=grids[VIDEO], merge=merge)


rates = st.one_of(
    st.sampled_from([0.5, 0.7, 1.0, 2.0, 2.5, 24.0, 29.97, 30.0]),
    st.floats(0.05, 120.0, allow_nan=False),
)


@pytest.mark.not_quick
@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 3), pictures, rates), max_size=5),
    last=st.integers(1, 3),
    merge=st.sampled_from([1, 2]),
    tokens_per_second=st.one_of(st.integers(1, 50), st.floats(0.5, 50.0)),
    temporal=st.integers(1, 3),
    longer=st.integers(1, 40),
)
@example(  # three steps are 125 in float32, and just below it in float64
    pieces=[(1, (VIDEO, (4, 1, 1)), 1.2)],
    last=1,
    merge=2,
    tokens_per_second=25,
    temporal=2,
    longer=1,
)
def test_blocks_agree_with_transformers(
    pieces: list[tuple[int, Picture, float]],
    last: int,
    merge: int,
    tokens_per_second: float,
    temporal: int,
    longer: int,
) -> None:
    """Qwen2.5-VL: a video is one block whose time axis goes in fractional steps."""
    ids: list[int] = []
    grids: dict[int, list[Grid]] = {IMAGE: [], VIDEO: []}
    seconds: list[float] = []
    for text, (kind, (time, height, width)), fps in pieces:
        if kind == VIDEO:
            time *= longer  # steps that add up to whole numbers and just beside them
            seconds.append(temporal / fps)
        ids += [TEXT] * text + [kind] * (time * height * width)
        grids[kind].append((time, height * merge, width * merge))
    ids += [TEXT] * last
    style = VideoStyle(timestamps=False, tokens_per_second=tokens_per_second)
    fps_of_videos = [fps for _, (kind, _), fps in pieces if kind == VIDEO]
    ours = mrope_position_ids(
        np.array(ids),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grids=grids[IMAGE],
        video_grids=grids[VIDEO],
        video_times=[
            style.times(grid[0], fps=fps, temporal_patch_size=temporal)
            for grid, fps in zip(grids[VIDEO], fps_of_videos, strict=True)
        ],
        spatial_merge_size=merge,
    )
    config = SimpleNamespace(spatial_merge_size=merge, tokens_per_second=tokens_per_second)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=config))
    model.get_vision_position_ids = partial(Qwen2_5_VLModel.get_vision_position_ids, model)
    types = [{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]
    expected, _ = Qwen2_5_VLModel.get_rope_index(
        model,
        torch.tensor([ids]),
        torch.tensor([types]),
        image_grid_thw=torch.tensor(grids[IMAGE]) if grids[IMAGE] else None,
        video_grid_thw=torch.tensor(grids[VIDEO]) if grids[VIDEO] else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    assert ours.tolist() == expected[:, 0].tolist()


def positions(ids: list[int], images: list[Grid]) -> list[list[int]]:
    return mrope_position_ids(
        np.array(ids), image_token_id=IMAGE, video_token_id=VIDEO, image_grids=images
    ).tolist()


def test_pictures_without_text_between_are_told_apart() -> None:
    assert positions([IMAGE, IMAGE, IMAGE], [(1, 2, 4), (1, 2, 2)]) == [
        [0, 0, 2],
        [0, 0, 2],
        [0, 1, 2],
    ]


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([TEXT, IMAGE], [(1, 4, 2)], "picture at token 1 has 1 tokens .* needs 2"),
        ([IMAGE, TEXT, IMAGE], [(1, 2, 4), (1, 2, 2)], "token 0 has 1 tokens .* needs 2"),
        ([IMAGE, IMAGE], [(1, 2, 2)], "No grid for the picture at token 1"),
        ([TEXT], [(1, 2, 2)], "1 more grids than pictures"),
    ],
)
def test_tokens_and_grids_that_do_not_match(
    ids: list[int], images: list[Grid], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        positions(ids, images)


AUDIO, SEEN, HEARD = 7, 8, 9


@given(
    pieces=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from(["image", "video", "sound"]),
            st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
            st.sampled_from([0.6, 1.0, 2.0, 2.3, 7.5, 24.0, 25.0, 30.0]),
        ),
        max_size=5,
    ),
    last=st.integers(1, 4),
)
def test_positions_are_times_of_sounds_too(pieces: Any, last: int) -> None:
    """As Qwen2.5-Omni's, where what follows a video starts after its last time."""
    style = VideoStyle(timestamps=False, tokens_per_second=25, as_sounds=True)
    ids: list[int] = []
    images, videos, times, seconds, frames = [], [], [], [], []
    for text, kind, (time, height, width), fps in pieces:
        ids += [TEXT] * text
        if kind == "sound":
            tokens = 1 + time * height
            frames.append(4 * tokens)
            ids += [HEARD, *[AUDIO] * tokens, HEARD + 1]
            continue
        if kind == "video":
            videos.append((time, 2 * height, 2 * width))
            seconds.append(2 / fps)
            times.append(style.times(time, fps=fps, temporal_patch_size=2))
        else:
            time = 1
            images.append((time, 2 * height, 2 * width))
        token = VIDEO if kind == "video" else IMAGE
        ids += [SEEN, *[token] * (time * height * width), SEEN + 3]
    ids += [TEXT] * last
    ours = mrope_position_ids(
        np.array(ids),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grids=images,
        video_grids=videos,
        video_times=times,
        after_times=True,
    )
    config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=SEEN,
        audio_start_token_id=HEARD,
        position_id_per_seconds=25,
        seconds_per_chunk=2,
    )
    model = SimpleNamespace(config=config, spatial_merge_size=2)
    base = Qwen2_5OmniThinkerModel
    model.get_llm_pos_ids_for_vision = partial(base.get_llm_pos_ids_for_vision, model)
    expected, _ = base.get_rope_index(
        model,
        torch.tensor([ids]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        audio_seqlens=torch.tensor(frames) if frames else None,
        second_per_grids=torch.tensor(seconds) if seconds else None,
    )
    assert ours.tolist() == expected[:, 0].long().tolist()
