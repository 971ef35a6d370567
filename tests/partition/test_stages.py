"""Splits of models: what is counted, what is kept, and what Megatron makes of the flag."""

from dataclasses import replace

import pytest
from costed import parsed
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.models.hugging_face_encoder import HuggingFaceEncoderConfig
from loongplug.partition.splits import _stages_of_encoders, layout_text
from loongplug.partition.stages import partition
from loongplug.training.layer_costs import Cost, EntryCosts

pytestmark = pytest.mark.quick


def entry(layers, *, trains=True, **beside):
    each = Cost(forward=1, backward=2 if trains else 0)
    return EntryCosts(layers=(each,) * layers, **beside)


def test_a_split_is_found_with_what_is_believed_and_timed_with_what_is():
    real = {"eyes": entry(6, trains=False), "text": entry(6, first=Cost(forward=6))}
    plain = {"eyes": entry(6), "text": entry(6, first=Cost(forward=6, backward=12))}
    stages = {"eyes": 2, "text": 2}
    aware, unaware = (
        partition("", real, believed=each, stages=stages, microbatches=4) for each in (real, plain)
    )
    assert (aware.sizes("eyes"), aware.sizes("text")) == ((3, 3), (2, 4))
    assert (unaware.sizes("eyes"), unaware.sizes("text")) == ((3, 3), (1, 5))
    assert [each.cost for each in aware.stages] == [
        *([Cost(forward=3, backward=0)] * 2),
        Cost(forward=8, backward=4),
        Cost(forward=4, backward=8),
    ]
    assert [each.layers for each in unaware.stages[2:]] == [range(1), range(1, 6)]
    assert (aware.slowest, unaware.slowest) == (("text", 12), ("text", 15))
    assert aware.step < unaware.step


def test_a_stage_does_all_of_its_chunks():
    """The output counts as two layers, of which the last rank has fewer then."""
    costs = {"text": entry(10, last=Cost(forward=2, backward=4))}
    pipeline = Pipeline(stages=2, stage=0, chunks=2, group=2)
    found = partition(
        "", costs, believed=costs, stages={"text": 2}, microbatches=4, pipeline=pipeline
    )
    assert found.sizes("text") == (3, 3, 3, 1)
    assert [each.number for each in found.stages] == [0, 1, 0, 1]
    assert found.slowest == ("text", 6 * 3)
    plain = partition("", costs, believed=costs, stages={"text": 2}, microbatches=4)
    assert plain.slowest == found.slowest
    assert (found.step, plain.step) == ((4 * 2 + 1) * 9, (4 + 1) * 18)  # half of the bubble


def test_what_all_ranks_do_around_the_schedule_is_of_the_step():
    costs = {"eyes": entry(6), "text": entry(6)}
    found = partition(
        "", costs, believed=costs, stages={"text": 2}, microbatches=4, around=["eyes"]
    )
    assert found.outside == 4 * 6 * 3
    assert found.step == found.alone["text"] + found.outside


def test_an_encoder_of_transformers_stays_in_one_piece():
    settings = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower = HuggingFaceEncoderConfig(model_type="vit", settings=settings)
    model = replace(parsed(model="llava_tiny").model, image_encoder=tower)
    given = {"model": model, "names": ["image_encoder"]}
    assert _stages_of_encoders(["image_encoder=1"], **given) == {"image_encoder": 1}
    with pytest.raises(ValueError, match=r"^--encoder-stages image_encoder=2: .* in one piece"):
        _stages_of_encoders(["image_encoder=2"], **given)


@given(st.integers(1, 3), st.data())
def test_megatron_reads_the_flag_as_it_is_meant(chunks, data):
    stages = data.draw(st.integers(2, 8))
    count = stages * chunks
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    layout = PipelineParallelLayerLayout(layout_text(sizes), stages)
    layout.validate_layer_layout(num_layers=sum(sizes), mtp_num_layers=None)
    assert layout.virtual_pipeline_model_parallel_size == chunks
    built = [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    assert built == [sizes[stage::stages] for stage in range(stages)]
