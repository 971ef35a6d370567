"""What a frozen module costs: bytes of gradients and of optimizer state, counted.

Counted on the tensors themselves, chunk by chunk, and held against the formulas of
docs/freezing.md, which take nothing but numbers of parameters. What activations take, the estimate
is held against (tests/estimate).
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from layout_flags import VPP2
from ranks import run_ranks

from loongplug.hetero.exchange import AllToAll
from loongplug.training.run import run
from loongplug.verify.optimizer_state import single_optimizers

pytestmark = pytest.mark.slow

PP = ("--pipeline-model-parallel-size", "2")
TP = ("--tensor-model-parallel-size", "2")
MODULES = {
    "image_encoder": "model.image_encoder.freeze=true",
    "image_projector": "model.image_projector.freeze=true",
    "text_decoder": "model.foundation.freeze=true",
}
RANK = 4
ADAPTED = {
    "image_encoder": f"+model.image_encoder.lora.rank={RANK}",
    "text_decoder": f"+model.foundation.lora.rank={RANK}",
}
LINEAR = re.compile(r".*\.linear_(qkv|proj|fc1|fc2)\.weight")
# What of a pad between parameters a sharded gradient buffer may have, in values.
PAD = 128


@dataclass
class Chunk:
    """Of one chunk: sizes by module, of all parameters and of adapters by formula; bytes."""

    numel: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    adapters: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tensors: int = 0
    gradients: int = 0


@dataclass
class Seen:
    """One rank's run: its chunks, bytes, and how often gradients of features travelled."""

    chunks: list[Chunk] = field(default_factory=list)
    state: int = 0
    sent_back: int = 0
    with_gradients: set[str] = field(default_factory=set)


class Looks:
    """Looks on while a run trains; see :class:`loongplug.training.run.Watch`."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def built(self, chunks: Any, optimizer: Any, *, mapping: Any) -> None:
        self.chunks, self.optimizer = chunks, optimizer
        for chunk in chunks:
            seen = Chunk()
            for name, parameter in chunk.module.named_parameters():
                seen.tensors += 1
                if "_lora." in name:
                    continue
                seen.numel[_module(name)] += parameter.numel()
                if LINEAR.fullmatch(name):
                    seen.adapters[_module(name)] += RANK * sum(parameter.shape)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                seen.gradients += buffer.grad_data.nbytes
            self.seen.chunks.append(seen)

    def loss(self, microbatch: Any, report: Any) -> None:
        pass

    def count_state(self) -> None:
        """Two moments, and what the optimizer holds as fp32 weights beside the model's.

        Also which parameters have a gradient, or a place for one.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.module.named_parameters():
                if parameter.grad is not None or hasattr(parameter, "main_grad"):
                    self.seen.with_gradients.add(_part(name))
        for single in single_optimizers(self.optimizer):
            if single.is_stub_optimizer:
                continue
            for group in single.optimizer.param_groups:
                for main in group["params"]:
                    state = single.optimizer.state[main]
                    self.seen.state += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
                    self.seen.state += 0 if isinstance(main, torch.nn.Parameter) else main.nbytes


def _module(name: str) -> str:
    return next(each for each in MODULES if f"{each}." in name)


def _part(name: str) -> str:
    """The parameter's module, or the adapters in it."""
    return _module(name) + ("'s adapters" if "_lora." in name else "")


def counted(rank: int, *, flags: list[str]) -> Seen:
    seen, scatter = Seen(), AllToAll.scatter_variable_shape_embeddings

    def scattering(self: AllToAll, *args: Any) -> Any:
        seen.sent_back += 1
        return scatter(self, *args)

    AllToAll.scatter_variable_shape_embeddings = scattering
    looks = Looks(seen)
    run(flags, watch=looks)
    looks.count_state()
    return seen


# What trains: modules, and adapters in a module that is else frozen.
TRAINED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all but the encoder": (("image_projector", "text_decoder"), ()),
    "decoder": (("text_decoder",), ()),
    "all but the decoder": (("image_encoder", "image_projector"), ()),
    "adapters": ((), tuple(ADAPTED)),
    "projector and the decoder's adapters": (("image_projector",), ("text_decoder",)),
}
LAYOUTS = {
    "uniform": PP,
    "hetero-dp": (*TP, "--enable-encoder-hetero-dp"),
    "full": (
        *PP,
        *VPP2,
        "--enable-full-hetero-dp",
        "--full-hetero-dp-schedule",
        "separated",
        "--use-distributed-optimizer",
        "--bf16",
    ),
}


@pytest.mark.parametrize(
    ("trained", "layout"),
    [
        *((each, "full") for each in TRAINED),
        ("all but the encoder", "uniform"),
        ("adapters", "hetero-dp"),
    ],
)
def test_what_is_frozen_costs_no_gradients_no_state_no_activations(flags, trained, layout):
    full = layout == "full"
    modules, adapted = TRAINED[trained]
    ranks = run_ranks(
        counted,
        2,
        flags=[
            *(*flags, *LAYOUTS[layout], "--train-iters", "1"),
            *(MODULES[each] for each in MODULES if each not in (*modules, *adapted)),
            *(ADAPTED[each] for each in adapted),
        ],
        timeout=120.0,
    )

    def of(chunk: Chunk, part: str) -> int:
        """Trained parameters of a module in a chunk."""
        return chunk.numel[part] if part in modules else chunk.adapters[part] * (part in adapted)

    for seen in ranks:
        assert len(seen.chunks) == (2 if full else 1)
        for chunk in seen.chunks:
            here = sum(of(chunk, part) for part in MODULES)
            pads = 4 * PAD * (chunk.tensors + len(MODULES)) if full and here else 0
            assert 4 * here <= chunk.gradients <= 4 * here + pads
        assert seen.with_gradients <= {*modules, *(f"{each}'s adapters" for each in adapted)}
        # Gradients of features go back where somebody wants them.
        vision = {*modules, *adapted} - {"text_decoder"}
        assert bool(seen.sent_back) == (layout != "uniform" and bool(vision))

    def held(seen: Seen, part: str) -> int:
        return sum(of(chunk, part) for chunk in seen.chunks)

    if not full:
        assert [seen.state for seen in ranks] == [
            8 * sum(held(seen, part) for part in MODULES) for seen in ranks
        ]
        return
    # The encoder's replicas, here all ranks, share its state; the decoder's stages have their own.
    distinct = sum(held(ranks[0], part) for part in MODULES) + held(ranks[1], "text_decoder")
    assert sum(seen.state for seen in ranks) == 12 * distinct
