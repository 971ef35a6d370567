"""Weights are loaded on the platform's device; meta stands for one that is not the host here."""

from types import SimpleNamespace

import pytest
import torch
from hf_models import Layout, decoder_config, reference_model
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import model_parallel, run_ranks
from tiny_families import QWEN3_VL_MOE

from loongplug.checkpoint import hf_import
from loongplug.models.registry import family_of
from loongplug.training import provider as provider_module
from loongplug.training.provider import ModelProvider

pytestmark = pytest.mark.quick


class Elsewhere:
    """A platform whose tensors are not the host's."""

    device = torch.device("meta")


def load(rank, *, folder):
    """The devices of what is broadcast while a rank of two loads, and of its chunk behind it."""
    model, sent = QWEN3_VL_MOE, []
    engine = SimpleNamespace(states={}, decodes=True, attach=lambda chunk: None)
    provider = ModelProvider(
        model, family_of(model), engine=engine, backend="local", hf_folder=folder
    )
    with model_parallel(tp=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_module, "current_platform", Elsewhere)
        patch.setattr(
            hf_import.dist, "broadcast", lambda tensor, **_: sent.append(tensor.device.type)
        )
        chunk = provider(
            config=decoder_config(model, Layout(tp=2)),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    return sent, {each.device.type for each in (*chunk.parameters(), *chunk.buffers())}


def test_chunks_are_on_the_device_before_their_weights_come(tmp_path):
    reference_model(QWEN3_VL_MOE).save_pretrained(tmp_path)
    for sent, held in run_ranks(load, 2, folder=tmp_path):
        assert held == {"meta"}
        assert sent  # routers and norms, which both ranks have
        assert set(sent) == {"meta"}
