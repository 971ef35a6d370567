"""Small models of every family, built in transformers and by us, in any layout."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import transformers
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from loongplug.models.architecture import VisionLanguageArchitecture
from loongplug.models.decoder import DecoderConfig
from loongplug.models.hf_config import hf_config
from loongplug.models.registry import family_of


@contextmanager
def trusted(package: str) -> Iterator[None]:
    """The package of the folder ``outside`` on the path, and trusted by what tests build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "models" / "outside"))
        trusting = partial(family_of, trusted_packages=[package])
        patch.setattr(sys.modules[__name__], "family_of", trusting)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a test run is laid out."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    ep: int = 1
    etp: int | None = None  # as Megatron: tp
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    sequence_parallel: bool = False
    recompute: bool = False
    micro_batch_size: int = 1
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        more = {"vpp": self.vpp, "ep": self.ep > 1 and self.ep, "etp": self.etp}
        parts += [f"{name}{size}" for name, size in more.items() if size]
        parts += [self.dispatcher] if self.dispatcher != "alltoall" else []
        flags = ("sequence_parallel", "recompute", "distributed_optimizer", "overlap_grad_reduce")
        return "-".join([*parts, *(name for name in flags if getattr(self, name))])


def reference_model(model: VisionLanguageArchitecture, *, seed: int = 0) -> Any:
    """The same architecture in transformers, randomly initialised, norms and biases too."""
    hugging_face = family_of(model).load_hugging_face(model)
    torch.manual_seed(seed)
    reference = getattr(transformers, hugging_face.in_transformers.architecture)(
        hf_config(hugging_face)
    )
    with torch.no_grad():
        for parameter in reference.parameters():  # nothing left at 0 or 1, where mistakes hide
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return reference.float()


def decoder_config(
    model: VisionLanguageArchitecture, layout: Layout, **options: Any
) -> DecoderConfig:
    """The decoder's Megatron config for a layout, fp32."""
    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    arguments = family_of(model).megatron_arguments(model)
    architecture = {name: argument.value for name, argument in arguments.items() if name in names}
    return DecoderConfig(
        **architecture,
        num_moe_experts=arguments["num_experts"].value,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        moe_token_dispatcher_type=layout.dispatcher,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=torch.float32,
        # as Megatron's arguments set them: two stages exchange in both directions at once
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        recompute_granularity="full" if layout.recompute else None,
        recompute_method="uniform" if layout.recompute else None,
        recompute_num_layers=1 if layout.recompute else None,
        **options,
    )


def build_chunks(model: VisionLanguageArchitecture, config: DecoderConfig, layout: Layout) -> list:
    """This rank's chunks of the model, not wrapped."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), layout.pp
    chunks = layout.vpp or 1
    return [
        family_of(model).load_builder(model)(
            model,
            config,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == stages - 1 and chunk == chunks - 1,
            vp_stage=chunk if layout.vpp else None,
            pg_collection=groups,
            backend="local",
        )
        for chunk in range(chunks)
    ]
