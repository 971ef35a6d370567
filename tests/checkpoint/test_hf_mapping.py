"""The mapping alone: packing, splitting, names. No ranks, no files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_qwen3_vl import hugging_face, tiny_config

from loongplug.models.hf_mapping import (
    Bundle,
    MappedParameter,
    Mapping,
    Row,
    Source,
    Split,
    shift_layers,
)
from loongplug.models.hf_slices import (
    full_shape,
    local_shape,
    pack,
    parts_of_local,
    read_local,
    unpack,
)

pytestmark = pytest.mark.quick


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """Every element another number, so that nothing can change places unseen."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float64).reshape(shape)


def entry(row: Row, expert: int = 0) -> MappedParameter:
    return list(Bundle(row, 0, None).entries())[expert]


def split_over(
    row: Row, tensors: list[torch.Tensor], tp: int, *, expert: int = 0
) -> list[torch.Tensor]:
    return [
        read_local(entry(row, expert), lambda i, where: tensors[i][where], rank=rank, tp=tp)
        for rank in range(tp)
    ]


def merged(row: Row, shards: list[torch.Tensor], *, expert: int = 0) -> list[torch.Tensor]:
    """Whole tensors from the shards of one expert; what belongs to others stays zero."""
    tensors = [torch.zeros(source.shape, dtype=shards[0].dtype) for source in row.sources]
    parts = 1 if row.split is Split.NONE else len(shards)
    for rank, shard in enumerate(shards[:parts]):
        for source, tensor in enumerate(tensors):
            for where, part in parts_of_local(
                entry(row, expert), shard, source=source, rank=rank, tp=parts
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


@given(rows_with_tensors())
@settings(max_examples=50, deadline=None)
def test_a_rank_reads_no_more_than_it_keeps(case):
    row, tensors, tp = case
    read = 0

    def counting(index, where):
        nonlocal read
        read += tensors[index][where].numel()
        return tensors[index][where]

    local = read_local(entry(row), counting, rank=tp - 1, tp=tp)
    assert read == local.numel()


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 3))
def test_unpack_undoes_pack(groups, sizes, width):
    shape = [width] if width else []
    parts = [numbered(groups * n, *shape, start=1000 * i) for i, n in enumerate(sizes)]
    packed = pack(parts, groups=groups)
    lengths = [7 * groups * n for n in sizes]  # only their ratio counts
    for part, back in zip(parts, unpack(packed, lengths, groups=groups), strict=True):
        assert torch.equal(part, back)


def test_qkv_is_in_megatrons_order():
    """Two query groups with two query heads each, head size 1: q q k v, group by group."""
    row = Row(("x",), (Source("q", (4,)), Source("k", (2,)), Source("v", (2,))), Split.COLUMN, 2)
    q, k, v = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20]), torch.tensor([100, 200])
    assert split_over(row, [q, k, v], 1)[0].tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    first, second = split_over(row, [q, k, v], 2)
    assert first.tolist() == [1, 2, 10, 100]
    assert second.tolist() == [3, 4, 20, 200]


def test_fused_qkv_is_in_megatrons_order():
    """Two heads of size 2: q, k, v of head 0, then of head 1."""
    row = Row(("x",), (Source("qkv", (12,), parts=3),), Split.COLUMN, groups=2)
    fused = torch.arange(12)  # q: 0-3, k: 4-7, v: 8-11
    assert split_over(row, [fused], 1)[0].tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert split_over(row, [fused], 2)[1].tolist() == [2, 3, 6, 7, 10, 11]


def test_every_rank_has_gate_then_up():
    row = Row(("x",), (Source("gate", (4,)), Source("up", (4,))), Split.COLUMN)
    gate, up = torch.arange(4), torch.arange(10, 14)
    first, second = split_over(row, [gate, up], 2)
    assert first.tolist() == [0, 1, 10, 11]
    assert second.tolist() == [2, 3, 12, 13]


def test_convolution_is_folded_like_its_patches():
    row = Row(("x",), (Source("conv", (2, 3, 2, 4, 4)),))
    weight = numbered(2, 3, 2, 4, 4)
    (local,) = split_over(row, [weight], 1)
    assert torch.equal(local, weight.reshape(2, 96))
    assert full_shape(row) == (2, 96)
    assert torch.equal(merged(row, [local])[0], weight)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_row_can_keep_its_axes(tp):
    split = Split.COLUMN if tp > 1 else Split.NONE
    row = Row(("x",), (Source("a", (4, 3, 2)), Source("b", (2, 3, 2))), split, 2, folded=False)
    tensors = [numbered(4, 3, 2), numbered(2, 3, 2, start=100)]
    shards = split_over(row, tensors, tp)
    assert full_shape(row) == (6, 3, 2)
    assert all(tuple(shard.shape) == local_shape(row, tp=tp) == (6 // tp, 3, 2) for shard in shards)
    for whole, original in zip(merged(row, shards), tensors, strict=True):
        assert torch.equal(whole, original)


def test_a_row_split_is_by_columns():
    row = Row(("x",), (Source("o", (2, 4)),), Split.ROW)
    assert split_over(row, [numbered(2, 4)], 2)[1].tolist() == [[2, 3], [6, 7]]


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


def test_a_name_can_have_only_one_row():
    row = Row(("x",), (Source("y", (1,)),))
    with pytest.raises(AssertionError):
        Mapping([row, row], twins={})


@given(st.integers(0, 40), st.integers(0, 40))
def test_layers_are_counted_from_the_offset(local, offset):
    prefix = "text_decoder.decoder.layers"
    name = f"{prefix}.{local}.mlp.linear_fc1.weight"
    shifted = shift_layers(name, {prefix: offset})
    assert shifted == f"{prefix}.{local + offset}.mlp.linear_fc1.weight"
    assert shift_layers(shifted, {prefix: -offset}) == name
    assert shift_layers(name, {"image_encoder.blocks.layers": offset}) == name
    assert shift_layers("image_projector.deepstack.1.norm.bias", {prefix: offset}) == (
        "image_projector.deepstack.1.norm.bias"
    )


def test_experts_with_tensors_of_their_own():
    sources = tuple(Source(f"layers.{{}}.{{expert}}.{name}", (2, 3)) for name in ("gate", "up"))
    row = Row(("ours.{}.fc1.{expert}",), sources, Split.COLUMN, count=2, experts=3)
    mapping = Mapping([Row(("first",), (Source("first", (5,)),)), row], twins={})
    assert list(mapping.sources()) == [
        "first",
        *(f"layers.{i}.{e}.{name}" for i in range(2) for e in range(3) for name in ("gate", "up")),
    ]
    bundles = list(mapping.bundles())
    assert len(bundles) == 1 + 2 * 3
    entries = [entry for bundle in bundles for entry in bundle.entries()]
    assert entries == list(mapping.entries())
    assert [entry.name for entry in entries[-2:]] == ["ours.1.fc1.1", "ours.1.fc1.2"]
    assert mapping.find("ours.1.fc1.2") == entries[-1]
    gate, up = numbered(2, 3), numbered(2, 3, start=6)
    read = {"layers.1.2.gate": gate, "layers.1.2.up": up}
    for rank in range(2):
        local = read_local(
            entries[-1],
            lambda index, where: read[entries[-1].sources[index].name][where],
            rank=rank,
            tp=2,
        )
        assert torch.equal(local, torch.stack([gate[rank], up[rank]]))


@pytest.mark.parametrize("tp", [1, 2])
def test_what_no_file_has_is_zero_and_goes_to_no_file(tp):
    heads, size = 4, 3
    row = Row(
        ("bias",),
        (
            Source("q", (heads * size,)),
            Source("k", (heads * size,), absent=True),
            Source("v", (heads * size,)),
        ),
        Split.COLUMN,
        groups=heads,
    )
    assert [source.name for source in Bundle(row, 0, None).sources] == ["q", "v"]
    assert Mapping([row], twins={}).sources() == {"q": (heads * size,), "v": (heads * size,)}
    files = [numbered(heads * size, start=1), numbered(heads * size, start=100)]
    shards = split_over(row, files, tp)
    assert all(tuple(each.shape) == local_shape(row, tp=tp) for each in shards)
    whole = torch.cat(shards).unflatten(0, (heads, 3, size))
    assert torch.equal(whole[:, 0].flatten(), files[0])
    assert not whole[:, 1].any()
    assert torch.equal(whole[:, 2].flatten(), files[1])
    for index, file in enumerate(files):
        found = torch.zeros_like(file)
        for rank, shard in enumerate(shards):
            for where, part in parts_of_local(entry(row), shard, source=index, rank=rank, tp=tp):
                found[where] = part
        assert torch.equal(found, file)
