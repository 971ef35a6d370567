"""The mapping alone: packing, splitting, names. No ranks, no files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_qwen3_vl import hugging_face, tiny_config

from loongplug.models.hf_mapping import Bundle, MappedParameter, Row, Source, Split
from loongplug.models.hf_slices import local_shape, parts_of_local, read_local

pytestmark = pytest.mark.quick


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """Every element another number, so that nothing can change places unseen."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float64).reshape(shape)


def entry(row: Row) -> MappedParameter:
    return next(Bundle(row, 0, None).entries())


def split_over(row: Row, tensors: list[torch.Tensor], tp: int) -> list[torch.Tensor]:
    return [
        read_local(entry(row), lambda i, where: tensors[i][where], rank=rank, tp=tp)
        for rank in range(tp)
    ]


def merged(row: Row, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Whole tensors from the shards."""
    tensors = [torch.zeros(source.shape, dtype=shards[0].dtype) for source in row.sources]
    parts = 1 if row.split is Split.NONE else len(shards)
    for rank, shard in enumerate(shards[:parts]):
        for source, tensor in enumerate(tensors):
            for where, part in parts_of_local(
                entry(row), shard, source=source, rank=rank, tp=parts
            ):
                tensor[where] = part
    return tensors


@st.composite
def rows_with_tensors(draw: st.DrawFn) -> tuple[Row, list[torch.Tensor], int]:
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    split = draw(st.sampled_from(list(Split)))
    parts = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3)) * (tp if split is Split.COLUMN else 1)
    rest = draw(st.lists(st.integers(1, 3), max_size=0 if split is Split.NONE else 1))
    if split is Split.ROW:
        rest, groups, parts = [tp * draw(st.integers(1, 3))], 1, 1
    fused = draw(st.booleans())
    lengths = [groups * tp * draw(st.integers(1, 3)) for _ in range(parts)]
    if fused:
        sources = (Source("x", (lengths[0] * parts, *rest), parts=parts),)
    else:
        sources = tuple(Source(f"x{i}", (length, *rest)) for i, length in enumerate(lengths))
    row = Row(("ours",), sources, split, groups=groups)
    tensors, start = [], 0
    for source in sources:
        tensors.append(numbered(*source.shape, start=start))
        start += tensors[-1].numel()
    return row, tensors, tp


@given(rows_with_tensors())
@settings(max_examples=150, deadline=None)
def test_splitting_then_merging_gives_back_every_bit(case):
    row, tensors, tp = case
    shards = split_over(row, tensors, tp)
    assert all(tuple(shard.shape) == local_shape(row, tp=tp) for shard in shards)
    for whole, original in zip(merged(row, shards), tensors, strict=True):
        assert torch.equal(whole, original)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(("a",), (Source("x", (6, 2)),), Split.COLUMN), "6 rows"),
        (Row(("a",), (Source("x", (2, 6)),), Split.ROW), "6 columns"),
        (Row(("a",), (Source("x", (24,), parts=3),), Split.COLUMN, groups=2), "2 groups of heads"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        local_shape(row, tp=4)


def test_every_entry_is_found_by_its_names():
    mapping = hugging_face(tiny_config(tied=True)).mapping
    for each in mapping.entries():
        assert mapping.find(each.name) == each
    fused = mapping.find("text_decoder.decoder.layers.3.mlp.linear_fc1.layer_norm_weight")
    assert fused is not None
    assert fused.sources[0].name == "model.language_model.layers.3.post_attention_layernorm.weight"
    fused = mapping.find("image_encoder.blocks.layers.1.self_attention.linear_qkv.layer_norm_bias")
    assert fused is not None
    assert fused.sources[0].name == "model.visual.blocks.1.norm1.bias"
    tied = mapping.find("text_decoder.output_layer.weight")
    assert tied == mapping.find("text_decoder.embedding.word_embeddings.weight")


@pytest.mark.parametrize(
    "name",
    [
        "text_decoder.decoder.layers.4.mlp.linear_fc2.weight",  # one layer too many
        "text_decoder.decoder.layers.0.mlp.linear_fc2.bias",
        "text_decoder.decoder.layers.x.mlp.linear_fc2.weight",
        "image_projector.deepstack.2.norm.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ],
)
def test_other_names_are_not_found(name):
    assert hugging_face(tiny_config(tied=False)).mapping.find(name) is None
