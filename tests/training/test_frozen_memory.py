"""What a frozen module costs: bytes of gradients, optimizer state and kept activations, counted.

Counted on the tensors themselves and held against the formulas of docs/freezing.md, which take
nothing but numbers of parameters.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import run_ranks

from loongplug.hetero.exchange import Exchange
from loongplug.models.multimodal import MultimodalModel
from loongplug.training.run import run
from loongplug.verify.state import single_optimizers

pytestmark = pytest.mark.slow

PP = ("--pipeline-model-parallel-size", "2")
MODULES = {
    "image_encoder": "model.image_encoder.freeze=true",
    "image_projector": "model.image_projector.freeze=true",
    "text_decoder": "model.foundation.freeze=true",
}
# What of a pad between parameters a sharded gradient buffer may have, in values.
PAD = 128


@dataclass
class Seen:
    """One rank's run: sizes by module, bytes, and how often gradients of features travelled."""

    numel: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tensors: int = 0
    gradients: int = 0
    state: int = 0
    kept: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent_back: int = 0
    features_forward: int = 0


class Looks:
    """Looks on while a run trains; see :class:`loongplug.training.run.Watch`."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def built(self, chunks: Any, optimizer: Any, *, mapping: Any) -> None:
        self.optimizer = optimizer
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                module = next(each for each in MODULES if f"{each}." in name)
                self.seen.numel[module] += parameter.numel()
                self.seen.tensors += 1
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                self.seen.gradients += buffer.grad_data.nbytes

    def loss(self, microbatch: Any, report: Any) -> None:
        pass

    def count_state(self) -> None:
        """Two moments, and what the optimizer holds as fp32 weights beside the model's."""
        for single in single_optimizers(self.optimizer):
            if single.is_stub_optimizer:
                continue
            for group in single.optimizer.param_groups:
                for main in group["params"]:
                    state = single.optimizer.state[main]
                    self.seen.state += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
                    self.seen.state += 0 if isinstance(main, torch.nn.Parameter) else main.nbytes


def counted(rank: int, *, flags: list[str]) -> Seen:
    seen = Seen()
    encode = MultimodalModel.encode
    gather = Exchange.gather_variable_shape_embeddings
    scatter = Exchange.scatter_variable_shape_embeddings

    def encoding(self: MultimodalModel, vision: Any) -> Any:
        """Bytes that autograd keeps in each module, without its weights."""
        calls = {}
        for name in ("image_encoder", "image_projector"):
            module = getattr(self, name)
            weights = {each.untyped_storage().data_ptr() for each in module.parameters()}
            calls[module] = module.forward

            def forward(
                *args: Any, name: str = name, module: Any = module, weights: Any = weights
            ) -> Any:
                storages: dict[int, int] = {}

                def pack(tensor: torch.Tensor) -> torch.Tensor:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in weights:
                        storages[storage.data_ptr()] = storage.nbytes()
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    result = calls[module](*args)
                seen.kept[name] += sum(storages.values())
                return result

            module.forward = forward
        try:
            return encode(self, vision)
        finally:
            for module in calls:
                del module.forward

    def gathering(self: Exchange, *args: Any) -> Any:
        seen.features_forward += 1
        return gather(self, *args)

    def scattering(self: Exchange, *args: Any) -> Any:
        seen.sent_back += 1
        return scatter(self, *args)

    MultimodalModel.encode = encoding
    Exchange.gather_variable_shape_embeddings = gathering
    Exchange.scatter_variable_shape_embeddings = scattering
    looks = Looks(seen)
    run(flags, watch=looks)
    looks.count_state()
    return seen


FROZEN = {
    "nothing": (),
    "encoder": ("image_encoder",),
    "vision": ("image_encoder", "image_projector"),
    "decoder": ("text_decoder",),
}
LAYOUTS = {
    "uniform": PP,
    "full": (*PP, "--enable-full-hetero-dp", "--use-distributed-optimizer", "--bf16"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen_costs_no_gradients_no_state_no_activations(flags, frozen, layout):
    full = layout == "full"
    still = set(MODULES) - set(FROZEN[frozen])
    ranks = run_ranks(
        counted,
        2,
        flags=[
            *(*flags, *LAYOUTS[layout], "--train-iters", "1"),
            *(MODULES[module] for module in FROZEN[frozen]),
        ],
        timeout=120.0,
    )
    for seen in ranks:
        trained = sum(count for module, count in seen.numel.items() if module in still)
        pads = 4 * PAD * (seen.tensors + len(MODULES)) if full and trained else 0
        assert 4 * trained <= seen.gradients <= 4 * trained + pads
        assert bool(seen.kept["image_encoder"]) == (
            "image_encoder" in still and bool(seen.numel["image_encoder"])
        )
        assert bool(seen.kept["image_projector"]) == (
            len(still & {"image_encoder", "image_projector"}) > 0
            and bool(seen.numel["image_projector"])
        )
        # One exchange each way in full separation; none back when nobody wants the gradients.
        assert seen.features_forward == full
        assert seen.sent_back == (full and frozen != "vision")
    if not full:
        assert [seen.state for seen in ranks] == [
            8 * sum(seen.numel[module] for module in still) for seen in ranks
        ]
        return
    # The encoder's replicas, here all ranks, share its state; the decoder's stages have their own.
    first, last = (seen.numel for seen in ranks)
    distinct = sum(first[module] for module in still) + (
        last["text_decoder"] if "text_decoder" in still else 0
    )
    assert sum(seen.state for seen in ranks) == 12 * distinct
