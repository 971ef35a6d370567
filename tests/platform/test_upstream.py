"""The table of replaced Megatron functions against the installed Megatron."""

import types
from typing import Any

import pytest
import torch
from ranks import model_parallel, run_ranks

from loongplug.platform import current_platform, upstream
from loongplug.platform.replacements import Replacement, ReplacementError, resolve
from loongplug.platform.upstream import EVERYWHERE, ON_CPU, apply_upstream_replacements

pytestmark = pytest.mark.quick

ROWS = EVERYWHERE + ON_CPU


def _value(row: Replacement) -> Any:
    return resolve(Replacement(target=row.target, reason=row.reason))[2]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_row_is_replaced_and_restored(row: Replacement) -> None:
    assert row.signature is not None, "every replaced Megatron function has its signature checked"
    table = current_platform()._tables["upstream"]  # type: ignore[attr-defined]
    active = _value(row)
    table.undo()
    try:
        original = _value(row)
        assert original is not active
        assert original.__module__.startswith("megatron.")
        resolve(row)  # the signature is that of the installed version
    finally:
        table.apply()
    assert _value(row) is not original


def test_by_value_copies_follow() -> None:
    import megatron.training
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.training import arguments, initialize, training

    assert megatron.training.initialize_megatron is initialize.initialize_megatron
    assert training.initialize_megatron is initialize.initialize_megatron
    assert arguments.get_device_arch_version() >= 10
    assert token_dispatcher.maybe_move_tensor_to_cpu is moe_utils.maybe_move_tensor_to_cpu
    assert initialize.initialize_megatron.__wrapped__ is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_changed_upstream_is_named(row: Replacement, monkeypatch: pytest.MonkeyPatch) -> None:
    table = current_platform()._tables["upstream"]  # type: ignore[attr-defined]
    table.undo()
    try:
        owner, name, _ = resolve(row)
        monkeypatch.setattr(owner, name, lambda surprise: None)
        with pytest.raises(ReplacementError) as caught:
            table.apply()
        assert str(caught.value).startswith(f"{row.target}: expected the signature {row.signature}")
        assert "found (surprise)" in str(caught.value)
        assert not table.active
    finally:
        monkeypatch.undo()
        table.apply()
        assert table.active


def test_missing_upstream_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = current_platform()._tables["upstream"]  # type: ignore[attr-defined]
    table.undo()
    try:
        from megatron.core.datasets import utils

        monkeypatch.delattr(utils, "compile_helpers")
        with pytest.raises(
            ReplacementError, match=r"utils\.compile_helpers: .*found no 'compile_h"
        ):
            table.apply()
        assert not table.active
    finally:
        monkeypatch.undo()
        table.apply()


def test_cuda_gets_no_cpu_row() -> None:
    used = []
    platform = types.SimpleNamespace(name="cuda", use=used.append)
    apply_upstream_replacements(platform)  # type: ignore[arg-type]
    assert used[0].rows == EVERYWHERE


def test_prebuilt_helpers_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets import helpers_cpp
    from megatron.core.datasets.utils import compile_helpers

    assert helpers_cpp is not None
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("make was run"))
    compile_helpers()
    monkeypatch.setattr(upstream.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="make was run"):
        compile_helpers()


def test_split_sizes_become_numbers_as_they_do_on_a_gpu() -> None:
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    sizes = maybe_move_tensor_to_cpu(torch.tensor([3, 1]), as_numpy=True, record_stream=False)
    assert not torch.is_tensor(sizes)
    assert list(sizes) == [3, 1]
    assert torch.is_tensor(maybe_move_tensor_to_cpu(torch.tensor([3])))
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def _training(weights: list[float], *, features: int) -> tuple[Any, Any]:
    """A DDP module with the distributed optimizer, and a function that takes one step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    module = torch.nn.Linear(3, features)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([weights]).expand(features, 3))
        module.bias.zero_()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, module)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True, clip_grad=0.0),
        [model],
    )

    def step(value: float) -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        # squared, so that Adam's second moment and its bias correction matter
        (model(torch.full((1, 3), value)) ** 2).sum().backward()
        model.finish_grad_sync()
        optimizer.step()

    return (model, optimizer), step


def _resume(rank: int, *, sharding: str, features: int) -> list[list[float]]:
    """Five steps in one go, and two plus three with the optimizer handed over by state dicts."""
    metadata = {
        "distrib_optim_sharding_type": sharding,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    inputs = [1.0, 0.5, -2.0, 3.0, 0.1]
    results = []
    with model_parallel():
        from megatron.core.dist_checkpointing import load
        from megatron.core.transformer.utils import (
            make_sharded_tensors_for_checkpoint as shard,
        )

        (model, _), step = _training([1.0, 2.0, 3.0], features=features)
        for value in inputs:
            step(value)
        results.append(model.module.weight.detach().flatten().tolist())

        (model, optimizer), step = _training([1.0, 2.0, 3.0], features=features)
        for value in inputs[:2]:
            step(value)
        saved_model = {k: v.clone() for k, v in model.module.state_dict().items()}
        saved = _through_a_folder(
            optimizer, shard(dict(model.module.named_parameters()), ""), metadata
        )

        (model, optimizer), step = _training([0.0, 0.0, 0.0], features=features)
        model.module.load_state_dict(saved_model)
        sharded = optimizer.sharded_state_dict(
            shard(dict(model.module.named_parameters()), ""), is_loading=True, metadata=metadata
        )
        optimizer.load_state_dict(load({"optimizer": sharded}, saved)["optimizer"])
        for value in inputs[2:]:
            step(value)
        results.append(model.module.weight.detach().flatten().tolist())
    return results


def _through_a_folder(optimizer: Any, model_state: Any, metadata: Any) -> str:
    import os
    import tempfile

    import torch.distributed as dist
    from megatron.core.dist_checkpointing import save

    names = [tempfile.mkdtemp(dir=os.getcwd())] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(names, src=0)
    assert names[0] is not None
    state = optimizer.sharded_state_dict(model_state, metadata=metadata)
    save({"optimizer": state}, names[0])
    return names[0]


# 400 elements are shared by both ranks; of 4 the second has none
@pytest.mark.parametrize("features", [100, 1])
@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
def test_adam_resumes_exactly_from_a_sharded_checkpoint(
    sharding: str, features: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for whole, resumed in run_ranks(_resume, 2, sharding=sharding, features=features):
        assert resumed == whole
