"""Checkpoints of other tensors are refused before anything is loaded, without a note."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

from loongplug.checkpoint.same_state import checked_load
from loongplug.platform.upstream_saving import synchronous_save_table

Shapes = dict[str, tuple[int, ...]]
SAVED = {"encoder.weight": (4, 6), "decoder.weight": (8, 2), "decoder.bias": (8,)}


def sharded(shapes: Shapes, *, everything: bool) -> dict[str, Any]:
    """A state dict of a model split over the ranks by its first axis, with an optimizer's state."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()

    def shard(name: str, shape: tuple[int, ...]) -> Any:
        local = torch.full((shape[0] // world, *shape[1:]), float(rank))
        return ShardedTensor.from_rank_offsets(name, local, (0, rank, world))

    state: dict[str, Any] = {"model": {name: shard(name, shape) for name, shape in shapes.items()}}
    if everything:
        state["optimizer"] = {name: shard(f"optimizer.{name}", (2,)) for name in shapes}
    return state


def save_and_load(rank: int, *, folder: Path, shapes: Shapes) -> Any:
    from megatron.core.dist_checkpointing import load, save

    synchronous_save_table().apply()
    save(sharded(SAVED, everything=True), str(folder))
    # Without the optimizer's state, as a run with --no-load-optim asks for it.
    loaded = checked_load(load)(sharded(shapes, everything=False), str(folder))
    return {name: bool((tensor == rank).all()) for name, tensor in loaded["model"].items()}


def test_the_same_tensors_are_loaded(tmp_path):
    assert (
        run_ranks(save_and_load, 2, folder=tmp_path, shapes=SAVED) == [dict.fromkeys(SAVED, 1)] * 2
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder.weight": (8, 4)}, "weight is (8, 2) in the checkpoint, (8, 4) here"),
        ({"decoder.bias": None}, "bias is (8,) in the checkpoint, absent here"),
        ({"decoder.extra": (2,)}, "extra is absent in the checkpoint, (2,) here"),
    ],
)
def test_what_differs_is_named(tmp_path, changes, said):
    shapes = {name: shape for name, shape in (SAVED | changes).items() if shape is not None}
    with pytest.raises(RankError, match="is of another model") as raised:
        run_ranks(save_and_load, 2, folder=tmp_path, shapes=shapes)
    assert len(raised.value.errors) == 2
    assert f"decoder.{said}" in str(raised.value)
    assert "encoder" not in str(raised.value)


@pytest.mark.quick
def test_whoever_sets_the_strictness_decides(tmp_path):
    load = checked_load(lambda state, folder, strict: (state, folder, strict))
    assert load({"model": {}}, str(tmp_path), strict="ignore_all")[2] == "ignore_all"
