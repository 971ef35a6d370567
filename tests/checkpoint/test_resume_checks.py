"""Checkpoints of other tensors, optimizers and rates are refused before anything is loaded."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

from loongplug.checkpoint import resume_checks
from loongplug.checkpoint.resume_checks import (
    check_known,
    check_optimizer,
    check_rates,
    checked_load,
)
from loongplug.parallel.parameter_groups import SavedRates
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


def run_args(distributed: bool, **more: bool) -> Namespace:
    given = {"no_load_optim": False, "finetune": False} | more
    return Namespace(use_distributed_optimizer=distributed, **given)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("saved", "expected"),
    [(True, "with --use.*; give --use-dist"), (False, "without --use.*; drop --use-dist")],
)
def test_the_other_kind_is_refused(saved, expected):
    with pytest.raises(ValueError, match=expected):
        check_optimizer(run_args(saved), run_args(not saved), folder=Path("run/iter_0000001"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("saved", "run"),
    [
        (run_args(True), run_args(True)),
        (run_args(True), run_args(False, no_load_optim=True)),
        (run_args(True), run_args(False, finetune=True)),
        (run_args(True, no_save_optim=True), run_args(False)),
        (Namespace(), run_args(True)),
        (None, run_args(False)),
    ],
)
def test_what_is_not_loaded_may_be_of_any_kind(saved, run):
    check_optimizer(saved, run, folder=Path("run/iter_0000001"))


@pytest.mark.quick
def test_a_module_s_rate_is_told_where_the_run_s_is_the_same():
    now = dict.fromkeys(resume_checks._MEANS, 1.0)
    fits = SavedRates(module="text_decoder", own=(1.0, 0.1), saved=(1.0, 0.1))
    other = SavedRates(module="image_encoder", own=(1.0, 0.1), saved=(2.0, 0.1))
    unknown = SavedRates(module="image_projector", own=(1.0, 0.1), saved=None)
    check_rates(now, now, [fits])
    with pytest.raises(
        ValueError, match=r"max_lr of image_encoder was 2\.0, is 1\.0 \(its"
    ) as said:
        check_rates(now, now, [fits, other])
    assert "min_lr" not in str(said.value)
    with pytest.raises(ValueError, match=r"max_lr was 2\.0, is 1\.0 \(--lr\)\. Give") as said:
        check_rates(now | {"max_lr": 2.0}, now, [other])
    check_known([fits, other])
    with pytest.raises(ValueError, match=r"learning rate of image_projector: .*--override-opt"):
        check_known([fits, unknown])
