"""A checkpoint resumed in another layout has the same weights and optimizer state, bit by bit.

Each layout is visited with each kind of optimizer and of experts where it could matter, but not in
each combination with precision: what a journey leaves out, another one of its kind has.
"""

from dataclasses import dataclass

import pytest
import torch
from full_state import read_state, run_and_keep_state
from ranks import run_ranks

pytestmark = pytest.mark.slow

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP = "--expert-model-parallel-size"
DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
ENCODER_TP = "model.image_encoder.tensor_model_parallel_size"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "dp2": (2, ()),
    "tp2-pp2": (4, (TP, "2", PP, "2")),
    "pp2-vpp2": (2, (PP, "2", "--num-virtual-stages-per-pipeline-rank", "2")),
    "tp2-dp2": (4, (TP, "2", "--sequence-parallel")),
    "tp4": (4, (TP, "4")),
    "tp4-encoder2": (4, (TP, "4", f"{ENCODER_TP}=2")),
    "tp4-encoder1": (4, (TP, "4", "--sequence-parallel", f"{ENCODER_TP}=1")),
    "tp2-pp2-encoder1": (4, (TP, "2", PP, "2", f"{ENCODER_TP}=1")),
    "dp-tp2": (2, (TP, "2", DP)),
    "dp-tp4-encoder2": (4, (TP, "4", f"{ENCODER_TP}=2", DP)),
    "full-pp2-vpp2": (2, (PP, "2", "--num-virtual-stages-per-pipeline-rank", "2", FULL)),
    "full-tp2-pp2": (4, (TP, "2", PP, "2", FULL)),
    "full-pp2-dp2": (4, (PP, "2", FULL)),
    "full-tp2-pp2-encoder4": (4, (TP, "2", PP, "2", f"{ENCODER_TP}=4", FULL)),
    "ep2": (2, (EP, "2")),
    "ep2-tp2": (4, (EP, "2", TP, "2", "--sequence-parallel")),
    "ep4-pp2": (8, (EP, "4", PP, "2")),
}


@dataclass(frozen=True, kw_only=True)
class Journey:
    """A model's checkpoint, saved in the first layout and handed on from each to the next."""

    layouts: tuple[str, ...]
    flags: tuple[str, ...] = ()


# Four groups of keys and values, for TP 4.
MODEL = ("model.foundation.num_query_groups=4",)
LORA = tuple(
    f"+model.{module}.lora.rank=2" for module in ("image_encoder", "image_projector", "foundation")
)
JOURNEYS = {
    "distributed": Journey(
        layouts=(
            "tp2-pp2",
            "single",
            "pp2-vpp2",
            "tp4-encoder1",
            "tp4",
            "tp4-encoder2",
            "tp2-dp2",
        ),
        flags=(*MODEL, "--use-distributed-optimizer"),
    ),
    "distributed-bf16": Journey(
        layouts=("dp2", "tp2-pp2-encoder1", "single"),
        flags=(*MODEL, "--use-distributed-optimizer", "--bf16"),
    ),
    "distributed-one-writer": Journey(
        layouts=("tp2-dp2", "pp2-vpp2"),
        flags=(
            *("--use-distributed-optimizer", "--distrib-optim-fully-reshardable-mem-efficient"),
        ),
    ),
    "plain": Journey(
        layouts=("tp2-pp2-encoder1", "tp4-encoder2", "pp2-vpp2", "dp2"),
        flags=MODEL,
    ),
    "plain-bf16": Journey(layouts=("single", "tp2-pp2", "dp2"), flags=(*MODEL, "--bf16")),
    "modes-distributed": Journey(
        layouts=(
            *("tp2-pp2", "full-tp2-pp2-encoder4", "dp-tp4-encoder2", "full-pp2-vpp2", "single"),
        ),
        flags=(*MODEL, "--use-distributed-optimizer"),
    ),
    "modes-plain-bf16": Journey(
        layouts=("full-pp2-dp2", "dp-tp2", "full-tp2-pp2-encoder4", "dp2"), flags=(*MODEL, "--bf16")
    ),
    "experts-distributed": Journey(
        layouts=("ep2", "ep2-tp2", "ep4-pp2"),
        flags=("--model-name", "qwen3_vl_moe_tiny", "--use-distributed-optimizer"),
    ),
    "experts-plain": Journey(
        layouts=("ep2-tp2", "single", "ep2", "dp2"), flags=("--model-name", "qwen3_vl_moe_tiny")
    ),
    "adapters-distributed": Journey(
        layouts=("tp2-pp2", "full-pp2-vpp2", "tp4-encoder2"),
        flags=(*MODEL, *LORA, "--use-distributed-optimizer", "--bf16"),
    ),
    "adapters-experts-plain": Journey(
        layouts=("ep2-tp2", "single"),
        flags=(*LORA, "--model-name", "qwen3_vl_moe_tiny"),
    ),
    "frozen-tied": Journey(
        layouts=("pp2-vpp2", "tp2-pp2-encoder1", "tp2-dp2", "single"),
        flags=(
            *("--use-distributed-optimizer", "model.foundation.tie_word_embeddings=true"),
            "+model.image_encoder.freeze=True",
        ),
    ),
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_another_layout_has_the_same_state(run_flags, tmp_path, name):
    journey = JOURNEYS[name]
    flags = [*run_flags, *journey.flags, "--save-interval", "3"]  # saved at the end, once
    expected, steps, previous = None, None, None
    for layout in journey.layouts:
        ranks, layout_flags = LAYOUTS[layout]
        folder = tmp_path / layout
        load = ("--load", str(previous)) if previous else ()
        is_last = layout == journey.layouts[-1]
        save = () if is_last else ("--save", str(folder / "checkpoints"))
        found_steps = run_ranks(
            run_and_keep_state,
            ranks,
            flags=[*flags, *layout_flags, *load, *save],
            folder=folder,
            timeout=120.0,
        )
        found = read_state(folder)
        if expected is None:
            expected, steps = found, found_steps[0]
            assert steps == [2.0]
            assert_meaningful(found)
        assert found_steps == [steps] * ranks
        assert_same(found, expected, layout)
        previous = folder / "checkpoints"


def assert_meaningful(state):
    """Every kind of state differs from the others, and most of it is not zero."""
    assert all(len(tensors) > 50 for tensors in state.values())
    for kind in ("exp_avg", "exp_avg_sq"):
        moved = [bool(tensor.any()) for tensor in state[kind].values()]
        assert sum(moved) > 20


def assert_same(found, expected, layout):
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        different = [
            name for name, tensor in tensors.items() if not torch.equal(found[kind][name], tensor)
        ]
        assert not different, f"{kind} in {layout}: {different}"
