"""A checkpoint resumed in another layout has the same weights and optimizer state, bit by bit.

Modes are uniform, heterogeneous TP and DP, full separation, and that with virtual stages. The first
five journeys together go from each mode to each other one; what is trained, the kind of optimizer,
precision and experts are spread over them.
"""

from dataclasses import dataclass

import pytest
import torch
from full_state import WEIGHTS, Kept, read_state, run_and_keep_state
from ranks import run_ranks
from safetensors.torch import load_file
from sweeps import sweep

from loongplug.convert.rank import convert

pytestmark = pytest.mark.slow

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP, CP = "--expert-model-parallel-size", "--context-parallel-size"
DP, FULL = "--enable-encoder-hetero-dp", "--enable-full-hetero-dp"
ENCODER_TP = "model.image_encoder.tensor_model_parallel_size"
APART = ("model.image_encoder.rank_offset=2",)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "dp2": (2, ()),
    "tp2-pp2": (4, (TP, "2", PP, "2")),
    "pp2-vpp2": (2, (PP, "2", "--num-virtual-stages-per-pipeline-rank", "2")),
    "tp2-dp2": (4, (TP, "2", "--sequence-parallel")),
    "tp4-encoder2": (4, (TP, "4", f"{ENCODER_TP}=2")),
    "tp4-encoder1": (4, (TP, "4", "--sequence-parallel", f"{ENCODER_TP}=1")),
    "tp2-pp2-encoder1": (4, (TP, "2", PP, "2", "--sequence-parallel", f"{ENCODER_TP}=1")),
    "dp-tp2": (2, (TP, "2", "--sequence-parallel", DP)),
    "dp-tp4-encoder2": (4, (TP, "4", f"{ENCODER_TP}=2", DP)),
    "full-pp2-vpp2": (2, (PP, "2", "--num-virtual-stages-per-pipeline-rank", "2", FULL)),
    "full-tp2-pp2": (4, (TP, "2", PP, "2", FULL)),
    "full-tp2-pp2-encoder4": (4, (TP, "2", PP, "2", f"{ENCODER_TP}=4", FULL)),
    "full-ep2-tp2": (4, (EP, "2", TP, "2", "--sequence-parallel", FULL)),
    "ep2-tp2": (4, (EP, "2", TP, "2", "--sequence-parallel")),
    "apart-pp2-encoder-dp2": (4, (PP, "2", *APART, "model.image_encoder.data_parallel_size=2")),
    "apart-dp2-encoder-pp2": (
        4,
        (
            *("--micro-batch-size", "1", *APART),
            "model.image_encoder.pipeline_model_parallel_size=2",
        ),
    ),
    "cp3": (3, (CP, "3")),
    "cp2-full": (2, (CP, "2", FULL)),
    "ep4-pp2": (8, (EP, "4", PP, "2")),
}


@dataclass(frozen=True, kw_only=True)
class Journey:
    """A model's checkpoint, saved in the first layout and handed on from each to the next.

    With ``trained_on``, two more steps in the last layout have the losses of the first one. With
    ``converted``, the last checkpoint becomes folders of the same model.
    """

    layouts: tuple[str, ...]
    flags: tuple[str, ...] = ()
    trained_on: bool = False
    converted: bool = False


# Four groups of keys and values, for TP 4.
MODEL = ("model.foundation.num_query_groups=4",)
EXPERTS = ("--model-name", "qwen3_vl_moe_tiny")
LORA = tuple(f"+model.{module}.lora.rank=2" for module in ("image_encoder", "foundation"))
DISTRIBUTED = "--use-distributed-optimizer"
JOURNEYS = {
    "trained": Journey(
        layouts=(
            *("tp2-pp2", "tp4-encoder1", "single", "dp-tp4-encoder2"),
            *("tp2-dp2", "full-tp2-pp2-encoder4"),
        ),
        flags=(*MODEL, DISTRIBUTED),
    ),
    "frozen-encoder": Journey(
        layouts=("full-ep2-tp2", "ep4-pp2", "full-pp2-vpp2", "tp2-pp2-encoder1", "dp-tp2"),
        flags=(
            *(*EXPERTS, DISTRIBUTED, "model.foundation.tie_word_embeddings=true"),
            "model.foundation.shared_expert_ffn_hidden_size=48",
            "+model.image_encoder.freeze=True",
        ),
        trained_on=True,
    ),
    "apart": Journey(
        layouts=(
            *("apart-pp2-encoder-dp2", "full-tp2-pp2", "apart-dp2-encoder-pp2", "single"),
            "apart-pp2-encoder-dp2",
        ),
        flags=(*MODEL, DISTRIBUTED),
    ),
    "parts of rows": Journey(
        layouts=("cp3", "cp2-full", "single", "cp3"),
        flags=(DISTRIBUTED, "--seq-length", "84"),
    ),
    # The first stage of two has trained parameters of the encoder alone.
    "patterns": Journey(
        layouts=(
            *("dp-tp4-encoder2", "tp4-encoder2", "full-tp2-pp2", "tp2-pp2-encoder1"),
            "full-pp2-vpp2",
        ),
        flags=(
            *(*MODEL, "--bf16", "--freeze-parameters", "text_decoder.decoder.layers.[01].*"),
            *("*word_embeddings*", "image_encoder.blocks.layers.1.*", "*.bias"),
        ),
        converted=True,
    ),
    "adapters": Journey(
        layouts=(
            *("full-pp2-vpp2", "dp-tp4-encoder2", "full-tp2-pp2-encoder4", "dp-tp2"),
            "full-pp2-vpp2",
        ),
        flags=(
            *(*MODEL, *LORA, DISTRIBUTED, "--bf16"),
            "--distrib-optim-fully-reshardable-mem-efficient",
        ),
        converted=True,
    ),
    "only-adapters": Journey(
        layouts=("full-pp2-vpp2", "full-ep2-tp2", "full-pp2-vpp2", "ep2-tp2"),
        flags=(*EXPERTS, *LORA, "+model.image_projector.lora.rank=2"),
        trained_on=True,
    ),
    "plain-bf16": Journey(layouts=("ep2-tp2", "dp2", "pp2-vpp2"), flags=(*EXPERTS, "--bf16")),
}


@pytest.mark.parametrize("name", sweep(JOURNEYS, but=("trained", "apart", "parts of rows")))
def test_another_layout_has_the_same_state(run_flags, tmp_path, name):
    journey = JOURNEYS[name]
    flags = [*run_flags, *journey.flags, "--save-interval", "9"]  # saved at the end, once

    def kept(number: int, *more: str) -> Kept:
        ranks, layout_flags = LAYOUTS[journey.layouts[number]]
        found = run_ranks(
            run_and_keep_state,
            ranks,
            flags=[*flags, *layout_flags, *more],
            folder=tmp_path / str(number),
            timeout=120.0,
        )
        last = found[-1]  # the last rank has trained parameters in all journeys
        # Each rank has the groups of the modules whose layout has it.
        rates = {group: rate for each in found for group, rate in each.rates.items()}
        assert all(each.rates.items() <= rates.items() for each in found)
        assert all(each.steps in ([], last.steps) for each in found)
        return last._replace(rates=rates)

    expected, first, load = None, None, ()
    for number, layout in enumerate(journey.layouts):
        checkpoint = str(tmp_path / str(number) / "checkpoint")
        is_last = number == len(journey.layouts) - 1
        last = kept(number, *load, *(() if is_last else ("--save", checkpoint)))
        found = read_state(tmp_path / str(number))
        if expected is None:
            expected, first = found, last
            assert last.steps == [2.0]
            assert_meaningful(found)
        assert (last.steps, last.rates) == (first.steps, first.rates)
        assert_same(found, expected, layout)
        load = load if is_last else ("--load", checkpoint)
    if journey.trained_on:
        more = ("--train-iters", "4", "--override-opt-param-scheduler")
        start = ("--load", str(tmp_path / "0" / "checkpoint"))
        losses, again = (
            kept(at, *more, *at_load).losses for at, at_load in ((0, start), (-1, load))
        )
        assert len(losses) == 2
        assert again == pytest.approx(losses, rel=2e-5)
    if journey.converted:
        assert_converted(run_flags, journey, load, expected[WEIGHTS], folder=tmp_path)


def assert_converted(run_flags, journey, load, expected, *, folder):
    """The adapters alone are the checkpoint's; merged, they are in the weights of their linears."""
    processor = run_flags[run_flags.index("--tokenizer-model") + 1]
    settings = [each for each in journey.flags if "model." in each]
    adapted = any("lora" in each for each in settings)
    flags = ["--model-name", "qwen3_vl_tiny", "--device", "cpu", "--tokenizer-model", processor]
    flags += [*settings, TP, "2", *load, "--save-hf", str(folder / "merged")]
    flags += ["--save-lora", str(folder / "alone")] if adapted else []
    run_ranks(converted, 2, flags=flags, timeout=120.0)
    alone = load_file(folder / "alone" / "adapter_model.safetensors") if adapted else {}
    merged = load_file(folder / "merged" / "model.safetensors")
    assert merged.keys() | alone.keys() == expected.keys()
    assert len(alone) > 20 or not adapted
    for name, tensor in alone.items():
        assert torch.equal(tensor, expected[name]), name
    changed = 0
    for name, tensor in merged.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        a, b = (expected.get(f"{prefix}{each}.weight") for each in "AB")
        if a is None:
            assert torch.equal(tensor, expected[name]), name
        else:
            sum_ = (expected[name].float() + b.float() @ a.float()).to(tensor.dtype)
            torch.testing.assert_close(tensor, sum_, rtol=1e-2, atol=1e-6)
            changed += not torch.equal(tensor, expected[name])
    assert changed > 20 or not adapted


def converted(rank, *, flags):
    convert(flags)


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
