"""mRoPE positions against the reference in transformers, and by hand."""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from loongplug.data.sample import Grid, mrope_position_ids
from loongplug.data.video import TIMESTAMPS, VideoStyle

pytestmark = pytest.mark.quick

TEXT, IMAGE, VIDEO, AUDIO, SEEN, HEARD = 1, 5, 6, 7, 8, 10
RATES = st.sampled_from([0.5, 0.6, 0.7, 1.0, 1.2, 2.0, 2.3, 2.5, 7.5, 24.0, 25.0, 29.97, 30.0])


def pieces_of(*kinds, rates=RATES):
    """Texts of so many tokens, each before a medium: kind, merged grid and rate."""
    grids = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
    return st.lists(st.tuples(st.integers(1, 4), st.sampled_from(kinds), grids, rates), max_size=5)


@dataclass
class Sequence:
    """Tokens, and what they need positions by."""

    ids: list[int] = field(default_factory=list)
    grids: dict[int, list[Grid]] = field(default_factory=lambda: {IMAGE: [], VIDEO: []})
    rates: list[float] = field(default_factory=list)  # of videos
    frames: list[int] = field(default_factory=list)  # of sounds

    @classmethod
    def of(cls, pieces, last, *, merge=2, longer=1, timestamps=False, marks=False):
        """``timestamps``: text is before each frame; ``marks``: tokens are around media."""
        made = cls()
        for text, kind, (time, height, width), fps in pieces:
            time, tokens = time * longer if kind == VIDEO else 1, height * width
            begin, end = (HEARD, HEARD + 1) if kind == AUDIO else (SEEN, SEEN + 1)
            whole = [kind] * (tokens if timestamps else time * tokens)
            whole = [begin, *whole, end] if marks else whole
            made.ids += ([TEXT] * text + whole) * (time if timestamps else 1)
            if kind == AUDIO:
                made.frames.append(4 * tokens)
                continue
            made.grids[kind].append((time, height * merge, width * merge))
            made.rates += [fps] * (kind == VIDEO)
        made.ids += [TEXT] * last
        return made

    def ours(self, style=TIMESTAMPS, *, merge=2, temporal=2):
        times = [
            style.times(grid[0], fps=fps, temporal_patch_size=temporal)
            for grid, fps in zip(self.grids[VIDEO], self.rates, strict=True)
        ]
        found = mrope_position_ids(
            np.array(self.ids, dtype=np.int64),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            image_grids=self.grids[IMAGE],
            video_grids=self.grids[VIDEO],
            video_times=None if style.timestamps else times,
            after_times=style.as_sounds,
            spatial_merge_size=merge,
        )
        assert found.dtype == np.int64
        return found.tolist()

    def theirs(self, family, config, **more):
        model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**config)))
        model.get_vision_position_ids = partial(family.get_vision_position_ids, model)
        types = [{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in self.ids]
        grids = {f"{name}_grid_thw": tensor(self.grids[kind]) for name, kind in NAMES}
        ids, types = torch.tensor([self.ids]), torch.tensor([types])
        positions, _ = family.get_rope_index(model, ids, types, **grids, **more)
        return positions[:, 0].tolist()


NAMES = (("image", IMAGE), ("video", VIDEO))


def tensor(values):
    return torch.tensor(values) if values else None


@settings(max_examples=200, deadline=None)
@given(pieces_of(IMAGE, VIDEO), st.integers(1, 3), st.sampled_from([1, 2, 3]))
def test_agrees_with_transformers(pieces, last, merge):
    made = Sequence.of(pieces, last, merge=merge, timestamps=True)
    expected = made.theirs(Qwen3VLModel, {"spatial_merge_size": merge})
    assert made.ours(merge=merge) == expected


@pytest.mark.not_quick
@settings(max_examples=300, deadline=None)
@given(
    pieces=pieces_of(IMAGE, VIDEO, rates=st.one_of(RATES, st.floats(0.05, 120.0))),
    last=st.integers(1, 3),
    merge=st.sampled_from([1, 2]),
    tokens_per_second=st.one_of(st.integers(1, 50), st.floats(0.5, 50.0)),
    temporal=st.integers(1, 3),
    longer=st.integers(1, 40),  # steps that add up to whole numbers and just beside them
)
@example(  # three steps are 125 in float32, and just below it in float64
    pieces=[(1, VIDEO, (4, 1, 1), 1.2)],
    last=1,
    merge=2,
    tokens_per_second=25,
    temporal=2,
    longer=1,
)
def test_blocks_agree_with_transformers(pieces, last, merge, tokens_per_second, temporal, longer):
    """Qwen2.5-VL: a video is one block whose time axis goes in fractional steps."""
    made = Sequence.of(pieces, last, merge=merge, longer=longer)
    style = VideoStyle(timestamps=False, tokens_per_second=tokens_per_second)
    config = {"spatial_merge_size": merge, "tokens_per_second": tokens_per_second}
    seconds = tensor([temporal / fps for fps in made.rates])
    expected = made.theirs(Qwen2_5_VLModel, config, second_per_grid_ts=seconds)
    assert made.ours(style, merge=merge, temporal=temporal) == expected


@given(pieces_of(IMAGE, VIDEO, AUDIO), st.integers(1, 4))
def test_positions_are_times_of_sounds_too(pieces, last):
    """As Qwen2.5-Omni's, where what follows a video starts after its last time."""
    made = Sequence.of(pieces, last, marks=True)
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
        torch.tensor([made.ids]),
        attention_mask=torch.ones(1, len(made.ids), dtype=torch.int64),
        audio_seqlens=tensor(made.frames),
        second_per_grids=tensor([2 / fps for fps in made.rates]),
        **{f"{name}_grid_thw": tensor(made.grids[kind]) for name, kind in NAMES},
    )
    style = VideoStyle(timestamps=False, tokens_per_second=25, as_sounds=True)
    assert made.ours(style) == expected[:, 0].long().tolist()


def positions(ids: list[int], images: list[Grid]) -> list[list[int]]:
    return mrope_position_ids(
        np.array(ids), image_token_id=IMAGE, video_token_id=VIDEO, image_grids=images
    ).tolist()


def test_pictures_without_text_between_are_told_apart():
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
def test_tokens_and_grids_that_do_not_match(ids, images, message):
    with pytest.raises(ValueError, match=message):
        positions(ids, images)
