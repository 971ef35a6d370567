"""The distributed optimizer over torch's Adam: a sharded checkpoint resumes it exactly."""

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import model_parallel, run_ranks


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
    from megatron.core.dist_checkpointing import save

    names = [tempfile.mkdtemp(dir=os.getcwd())] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(names, src=0)
    assert names[0] is not None
    state = optimizer.sharded_state_dict(model_state, metadata=metadata)
    save({"optimizer": state}, names[0])
    return names[0]


# 400 elements are shared by both ranks; of 4 the second has none
@pytest.mark.parametrize(
    ("sharding", "features"),
    [("dp_reshardable", 100), ("fully_reshardable", 100), ("dp_reshardable", 1)],
)
def test_adam_resumes_exactly_from_a_sharded_checkpoint(
    sharding: str, features: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for whole, resumed in run_ranks(_resume, 2, sharding=sharding, features=features):
        assert resumed == whole
