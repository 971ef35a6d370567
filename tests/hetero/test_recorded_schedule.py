"""The messages of Megatron's own schedules as they are recorded."""

from collections import Counter
from dataclasses import replace

import pytest
from test_pass_order import interleaved, plain

from loongplug.hetero.pass_order import Pipeline, Turn
from loongplug.hetero.recorded_schedule import Posted, Waited, calls

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("beside_sends", [False, True])
def test_what_a_stage_sends_the_next_one_receives(beside_sends: bool) -> None:
    """As many each way, around the pipeline."""
    steps = {
        (replace(pipeline, stage=0), microbatches)
        for pipeline, microbatches in (*interleaved(), *(() if beside_sends else plain()))
    }
    for pipeline, microbatches in steps:
        counts: Counter[tuple[bool, bool, int]] = Counter()
        for stage in range(pipeline.stages):
            here = replace(pipeline, stage=stage)
            for call in calls(here, microbatches, beside_sends=beside_sends):
                for way in call.ways if isinstance(call, Posted) else ():
                    peer = (stage + (1 if way.to_next else -1)) % pipeline.stages
                    counts[way.forward, way.sends, stage if way.sends else peer] += 1
        assert bool(counts) == (pipeline.stages > 1)
        for (forward, sends, source), count in counts.items():
            assert counts[forward, not sends, source] == count


def test_passes_go_on_beside_what_is_sent() -> None:
    """With the flag for it, a pass lies between a message's post and its wait."""
    stage = Pipeline(stages=2, stage=1, chunks=2, group=2)
    for beside_sends in (False, True):
        found = calls(stage, 8, beside_sends=beside_sends)
        between = [
            any(isinstance(each, Turn) for each in found[call.posted : at])
            for at, call in enumerate(found)
            if isinstance(call, Waited)
        ]
        assert any(between) == beside_sends
