"""Megatron's own schedules as they are recorded; ``test_one_queue.py`` has their messages meet."""

import pytest

from loongplug.hetero.recorded_schedule import Pipeline, Posted, Turn, Waited, calls, forwards_first
from loongplug.hetero.step_programs import DecoderPass, decoder_passes

pytestmark = pytest.mark.quick


def test_passes_go_on_beside_what_is_sent() -> None:
    """With the flag for it, a pass lies between a message's post and its wait."""
    stage = Pipeline(stages=2, stage=1, chunks=2, group=2)
    for beside_sends in (False, True):
        found = calls(stage, 8, beside_sends=beside_sends)
        posted = {
            end: at
            for at, call in enumerate(found)
            if isinstance(call, Posted)
            for end in call.ends
        }
        between = [
            any(isinstance(each, Turn) for each in found[posted[end] : at])
            for at, call in enumerate(found)
            if isinstance(call, Waited)
            for end in call.ends
        ]
        assert any(between) == beside_sends


def test_a_pass_knows_its_place_on_the_microbatch_s_way() -> None:
    second = Pipeline(stages=2, stage=1, chunks=2, group=2)
    first = decoder_passes(second, 2)[:4]
    assert first == (
        DecoderPass(forward=True, place=1, microbatch=0),
        DecoderPass(forward=True, place=1, microbatch=1),
        DecoderPass(forward=True, place=3, microbatch=0),
        DecoderPass(forward=False, place=3, microbatch=0),
    )


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "overlaps", "forwards"),
    [
        (1, 1, 1, False, [2, 3, 4, 5, 6, 6]),
        (1, 1, 1, True, [3, 4, 5, 6, 6, 6]),
        (2, 2, 2, False, [5, 6, 7, 8, 8, 8, 8, 8]),
        # Until its sixth backward, the decoder takes nothing of the third group: neither may the
        # encoder go on before it has that one's gradient.
        (2, 3, 6, False, [13, 13, 13, 13, 13, 18, *[18] * 12]),
        (2, 2, 6, False, [10, 11, 12, 13, 13, 15, 16, 17, 18, *[18] * 9]),
    ],
)
def test_forwards_of_an_encoder_apart_before_each_backward(
    stages: int, chunks: int, group: int, overlaps: bool, forwards: list[int]
) -> None:
    first = Pipeline(stages=stages, stage=0, chunks=chunks, group=group, overlaps=overlaps)
    assert [*forwards_first(first, len(forwards), behind=0)] == forwards
