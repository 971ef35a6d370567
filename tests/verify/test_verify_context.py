"""Rows whose tokens lie on several ranks against a single rank, and what must not go unseen."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_stand_in import engine_attention
from parity.encoder_faults import average_the_parts
from parity.gradient_faults import count_a_parts_tokens
from parity.mutations import around
from PIL import Image
from verify_cases import (
    CP2,
    FULL,
    OMNI,
    OVERLAPPED,
    PP2,
    RECOMPUTED,
    SEES,
    SP,
    TP2,
    VPP2,
    Pair,
    failing,
    keep_parts,
    lies,
    made_plan,
    write_changed_rows,
)

from loongplug.models.layers.context import engine
from loongplug.models.layers.context.engine import over_parts_of_rows

CP3 = ("--context-parallel-size", "3")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
ADAPTED = ("+model.image_encoder.lora.rank=4", "+model.foundation.lora.rank=4")
EXPERTS = (
    *("--model-name", "qwen3_vl_moe_tiny", "--expert-model-parallel-size", "2"),
    *("--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.1"),
    "--moe-router-load-balancing-type",
)
OVERLAP = "--overlap-moe-expert-parallel-comm"
ENCODER = "model.image_encoder"
ENCODER_DP = ("--enable-encoder-hetero-dp",)


hears_from = partial(lies, of="audio")
WITH_SOUNDS = ("--model-name", OMNI)
MBS2 = ("--micro-batch-size", "2")
TENSORS_AWAY = (
    *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1024"),
    *("--offload-tensors", "layer_input", "qkv", "fc1_output", "fc2_input"),
)
# Ranks in all, and flags. Many more are cells of the parity matrix (tests/parity/parts.py).
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "cp2-tp2-encoder-tp1": (4, (*CP2, *TP2, f"{ENCODER}.tensor_model_parallel_size=1")),
    "cp2-pp2-packed-p2p": (4, (*CP2, *PP2, "--packing", "--cp-comm-type", "p2p")),
    "cp2-dp2-overlapped-a2a": (4, (*CP2, *OVERLAPPED, "--cp-comm-type", "a2a", *SELECTIVE)),
    "cp2-vpp2-recomputed": (4, (*CP2, *VPP2, *RECOMPUTED)),
    "cp2-adapted": (2, (*CP2, *ADAPTED)),
    "cp2-experts-packed": (2, (*CP2, *EXPERTS, "aux_loss", "--packing")),
    "cp2-tp2-experts": (4, (*CP2, *SP, *EXPERTS, "seq_aux_loss", "--micro-batch-size", "2")),
    "cp2-experts-overlapped": (2, (*CP2, *EXPERTS, "aux_loss", OVERLAP)),
    "cp2-text": (2, CP2),
    "cp2-tensors-away": (2, (*CP2, *TENSORS_AWAY)),
    "cp2-sees-and-hears": (2, (*CP2, *WITH_SOUNDS)),
    "cp3-separated-balanced-packed": (3, (*CP3, *FULL, "--use-vit-dp-balance", "--packing")),
    "cp2-tp2-shards-separated": (4, (*CP2, *SP, *FULL, "--micro-batch-size", "2")),
    "cp2-sees-and-hears-apart": (5, (*CP2, *WITH_SOUNDS, *lies(2), *hears_from(3, dp=2), *MBS2)),
    "cp2-tp2-encoder-dp": (4, (*CP2, *TP2, *ENCODER_DP)),
}


def pair_of(folder: Path, name: str) -> Pair:
    ranks, flags = CASES[name]
    if "text" in name:
        write_changed_rows(folder, lambda _, sample: keep_parts(sample, "text"))
    return Pair(made_plan(folder, *flags, ranks=ranks, steps=1), folder)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    pair = pair_of(tmp_path, name)
    pair.agreeing()


def by_the_engine(rank: int, *, folder: Path) -> None:
    """Decoders attend by TransformerEngine's attention, a stand-in; each call is written down."""
    attention = over_parts_of_rows(engine_attention())
    engine._HALF = (torch.float32,)  # in which runs are compared

    def noted(original: Any, *given: Any, **options: Any) -> Any:
        with (folder / f"calls-{rank}").open("a", encoding="utf-8") as file:
            print(*given[1].shape[:2], file=file)
        return original(*given, **options)

    around("engine_stand_in:StandInAttention.forward", noted)
    around(
        "loongplug.models.layers.specs:SDPASpecProvider.core_attention",
        lambda original, self: attention,
        where=lambda self: self._split_rows,
    )


def in_another_order(rank: int, *, folder: Path) -> None:
    """The same, of an engine that takes a rank's two chunks as neighbours."""
    by_the_engine(rank, folder=folder)
    around("engine_stand_in:_chunks_of", lambda original, rank, ranks: (2 * rank, 2 * rank + 1))


def test_padded_rows_by_the_engine_agree(tmp_path: Path) -> None:
    """And an engine that took rows in another order would be seen."""
    pair = Pair(made_plan(tmp_path, *CP2, *MBS2, *RECOMPUTED, ranks=2, steps=1), tmp_path)
    pair.agreeing(partial(by_the_engine, folder=tmp_path))
    for rank in range(2):
        assert (tmp_path / f"calls-{rank}").read_text(encoding="utf-8"), "it was asked"
    comparison = pair.compared(partial(in_another_order, folder=tmp_path))
    assert "text_decoder layers" in failing(comparison, "gradients")
    assert any(each.fails for each in comparison.losses)


def write_images_over(folder: Path) -> None:
    """Rows of one turn: with a large image, with two small ones, and with none."""

    def change(number: int, sample: dict[str, Any]) -> None:
        keep_parts(sample, "text")
        sample["messages"] = sample["messages"][:2]
        for name in (["large"], ["small", "small"], [])[number % 3]:
            image = {"type": "image", "image": f"{name}.png"}
            sample["messages"][0]["content"].insert(0, image)

    write_changed_rows(folder, change)
    for side, size in {"large": (128, 160), "small": (32, 32)}.items():  # of 20 tokens, and of one
        Image.effect_noise(size, 80).convert("RGB").save(folder / f"data/{side}.png")


def note_features(rank: int, *, folder: Path) -> None:
    """How many features each rank places in each of a microbatch's two rows."""

    def noted(original: Any, *given: Any, **options: Any) -> Any:
        places = original(*given, **options)
        with (folder / f"features-{rank}").open("a", encoding="utf-8") as file:
            print(*places.sample.bincount(minlength=2).tolist(), file=file)
        return places

    around("loongplug.models.decoder:token_places", noted)


def test_images_over_all_parts_of_a_row_and_ranks_without_any(tmp_path: Path) -> None:
    write_images_over(tmp_path)
    pair = Pair(made_plan(tmp_path, *CP3, *MBS2, ranks=3, steps=1), tmp_path)
    pair.agreeing(partial(note_features, folder=tmp_path))
    files = [tmp_path / f"features-{rank}" for rank in range(3)]
    counts = [[*map(int, file.read_text(encoding="utf-8").split())] for file in files]
    rows = [*zip(*counts, strict=True)]
    assert any(all(row) for row in rows), "an image lies on all ranks"
    assert any(any(row) and not all(row) for row in rows), "some ranks have none of a row's"
    assert (0, 0, 0) in rows


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("experts"), "cp2-experts-packed")


def test_parts_of_an_encoder_s_gradient_that_are_averaged(experts: Pair) -> None:
    comparison = experts.compared(average_the_parts)
    wrong = [each for each in comparison.tensors if each.what == "gradients" and each.fails]
    assert {each.module for each in wrong} == SEES
    assert all(each.ratio == pytest.approx(0.5, rel=1e-3) for each in wrong)
    assert not any(each.fails for each in comparison.losses)


def test_routers_that_weigh_by_their_part_of_a_row(experts: Pair) -> None:
    comparison = experts.compared(count_a_parts_tokens)
    assert "text_decoder layers" in failing(comparison, "gradients")
    assert not any(each.fails for each in comparison.losses)
