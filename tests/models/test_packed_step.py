"""A step on packs against the same step on padded samples, in every family and layout.

What is held against each other is our own: loss, logits of every token and every gradient, in
fp32, within 1e-5 of the padded step at one rank. That one is held against transformers elsewhere.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hf_batches import Batch, Packs, batch, packed
from hf_models import Layout, reference_model
from hf_reference import Reference, Step, assert_agrees, our_step
from ranks import run_ranks
from tiny_families import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, SP, ragged, tied

from loongplug.models.architecture import VisionLanguageArchitecture

LIMIT = 1e-5
# Images and a video in a full pack; text alone; videos; one sample with much padding behind it.
PACKS = ((0, 2, 3), (1, 4), (7, 5), (6,))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
LAYOUTS = [
    Layout(),
    Layout(pp=2, vpp=2),
    Layout(pp=2, recompute=True, **SP),
]


@dataclass(frozen=True)
class Family:
    model: VisionLanguageArchitecture
    folder: Path  # its weights
    data: Batch

    @property
    def seq_length(self) -> int:
        """That of the first pack, which is full."""
        return sum(self.data.samples[number].tokens for number in PACKS[0])

    def step(self, *, data: Batch, layout: Layout, **options) -> Step:
        return run_ranks(
            our_step,
            layout.world_size,
            folder=self.folder,
            model=self.model,
            layout=layout,
            data=data,
            options=options,
        )[0]

    def packs(self, numbers: tuple[tuple[int, ...], ...] = PACKS) -> Packs:
        return packed(self.data, numbers, seq_length=self.seq_length)


FAMILIES = {
    "qwen3_vl": (QWEN3_VL, batch),
    "qwen2_5_vl": (tied(QWEN2_5_VL), ragged),
    "qwen3_vl_moe": (QWEN3_VL_MOE, batch),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    (model, data), folder = FAMILIES[request.param], tmp_path_factory.mktemp("hf")
    reference_model(model).save_pretrained(folder)
    return Family(model, folder, data())


@pytest.fixture(scope="module")
def padded(family) -> Step:
    return family.step(data=family.data, layout=Layout())


def as_packs(step: Step, family: Family, packs: tuple[tuple[int, ...], ...] = PACKS) -> Step:
    """The padded step with its logits in the order of the packs."""
    rows = []
    for numbers in packs:
        pieces = [step.logits[number, : family.data.samples[number].tokens] for number in numbers]
        row = step.logits.new_zeros(family.seq_length, step.logits.shape[-1])
        row[: sum(map(len, pieces))] = torch.cat(pieces)
        rows.append(row)
    return dataclasses.replace(step, logits=torch.stack(rows))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packs_train_as_padded_samples_do(family, padded, layout):
    expected = as_packs(padded, family)
    reference = Reference(family.model, family.folder, family.packs(), expected)
    assert_agrees(reference, layout, limit=LIMIT)


BALANCING = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.5],  # large, so that a wrong factor shows
    "moe_z_loss_coeff": 0.02,
}


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, **SP)], ids=str)
def test_experts_balance_the_samples_of_a_pack_as_those_of_a_padded_microbatch(family, layout):
    """A sample's first token, at position 0, is no padding; what stands behind the pack is."""
    padded = family.step(data=family.data, layout=Layout(micro_batch_size=2), **BALANCING)
    expected = as_packs(padded, family, PAIRS)
    reference = Reference(family.model, family.folder, family.packs(PAIRS), expected)
    assert_agrees(reference, layout, limit=LIMIT, **BALANCING)
