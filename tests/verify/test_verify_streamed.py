"""An encoder in the pipeline's bubbles against a single rank, and what must not go unseen."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from free_passes import free_passes
from parity.built_in import around
from parity.mutations import give_a_gradient_to_the_wrong_owner, swap_two_microbatches_gradients
from verify_cases import (
    CP2,
    OMNI,
    OVERLAPPED,
    PP2,
    SEES,
    SP,
    TINY,
    VPP2,
    Mutation,
    Pair,
    failing,
    keep_parts,
    made_plan,
    write_changed_rows,
)

from loongplug.data.sample_order import epoch_permutation
from loongplug.verify.plan import SAMPLES

STREAMED = ("--enable-full-hetero-dp", "--full-hetero-dp-schedule", "streamed")
AWAY = ("--offload-encoder-activations", "--global-batch-size", "16")
# Ranks in all, and flags. Many more are cells of the parity matrix (tests/parity/parts.py). A model
# with sounds has its encoder of images, which has most work, streamed and the other separated.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp2-tp2-sp-overlapped": (4, (*PP2, *SP, *OVERLAPPED)),
    "pp2-vpp2": (2, (*VPP2, "--global-batch-size", "8")),
    "pp2-cp2": (4, (*PP2, *CP2)),
    "pp2-activations-away": (2, (*PP2, *AWAY)),
    "pp2-tp2-sp-sounds-tp2": (4, (*PP2, *SP, "model.audio_encoder.tensor_model_parallel_size=2")),
    "pp2-vpp2-images-adapted-sounds-frozen": (
        2,
        (*VPP2, "+model.image_encoder.lora.rank=2", "model.audio_encoder.freeze=true"),
    ),
}


def noting(rank: int, *, folder: Path, before: Mutation | None = free_passes) -> None:
    """Write down what a rank does in steps that stream; ``before`` that, change what it runs.

    That are the pieces of each microbatch, how many passes through the encoder are between the
    decoder's, and how many microbatches each has pieces of.
    """

    def noted(original: Callable[..., Any], self: Any) -> None:
        step, passes = self._now, self.streamed_passes
        original(self)
        if passes is None:
            return
        work = step.streamed.work[self.streaming.replica]
        within = sum(0 < each.before < len(passes) for each in work)
        planned = step.streamed.pieces
        together = [{planned[n].microbatch for n in each.pieces} for each in work]
        found = [[len(each) for each in step.pieces], within, [*map(len, together)]]
        found.append(self.entry.name)
        with (folder / f"streamed-{rank}").open("a", encoding="utf-8") as file:
            print(json.dumps(found), file=file)

    def leaving(original: Callable[..., Any], self: Any, *args: Any) -> Any:
        (folder / f"left-{rank}").touch()
        return original(self, *args)

    around("loongplug.hetero.executor:Executor.end", noted)
    around("loongplug.hetero.executed_step:HostMoves._leaving", leaving)
    if before is not None:
        before(rank)


def streamed(folder: Path, ranks: int) -> list[tuple[list[int], int, list[int], str]]:
    """What was noted: of each step of each rank."""
    files = [folder / f"streamed-{rank}" for rank in range(ranks)]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_a_single_rank(name: str, tmp_path: Path) -> None:
    ranks, flags = CASES[name]
    model = OMNI if "sounds" in name else TINY[-1]
    plan = made_plan(tmp_path, *STREAMED, *flags, model=model, ranks=ranks)
    Pair(plan, tmp_path).agreeing(partial(noting, folder=tmp_path))
    found = streamed(tmp_path, ranks)
    assert {encoder for *_, encoder in found} == {"image_encoder"}
    assert any(within for _, within, *_ in found), "nothing was done between passes"
    left = list(tmp_path.glob("left-*"))
    assert len(left) == (ranks if "away" in name else 0), "activations did not leave"


def test_an_encoder_without_media_agrees_beside_one_that_streams(tmp_path: Path) -> None:
    """Rows have images alone; the encoder of sounds has nothing, and trains."""
    write_changed_rows(
        tmp_path, lambda _, row: keep_parts(row, "image", "text"), media=["image", "audio"]
    )
    plan = made_plan(tmp_path, *STREAMED, *PP2, *OVERLAPPED, model=OMNI)
    Pair(plan, tmp_path).agreeing(partial(noting, folder=tmp_path))
    assert any(within for _, within, *_ in streamed(tmp_path, 2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """PP 2; of four rows in their order, the second has no images."""
    folder = tmp_path_factory.mktemp("streamed")
    text = {*epoch_permutation(SAMPLES, seed=1234, epoch=0)[1::4]}  # Megatron's default seed
    write_changed_rows(
        folder, lambda number, row: keep_parts(row, "text") if number in text else None
    )
    return Pair(made_plan(folder, *STREAMED, *PP2, steps=2), folder)


def test_rows_without_images_and_others_agree(pair: Pair, tmp_path: Path) -> None:
    pair.agreeing(partial(noting, folder=tmp_path))
    found = streamed(tmp_path, 2)
    assert any(within for _, within, *_ in found)
    assert any(0 in pieces and max(pieces) > 1 for pieces, *_ in found)


def test_several_microbatches_in_one_pass_agree(pair: Pair, tmp_path: Path) -> None:
    """As plans are where passes count."""
    pair.agreeing(partial(noting, folder=tmp_path, before=None))
    found = streamed(tmp_path, 2)
    assert any(max(together, default=0) > 1 for _, _, together, _ in found)


def freely(rank: int, *, fault: Mutation) -> None:
    """A fault in a run of many passes."""
    free_passes(rank)
    fault(rank)


def turn_gradients_within_passes(rank: int) -> None:
    """Those of a pass's pieces stand in the wrong order; all shapes are right."""

    def turned(original: Callable[..., Any], self: Any, pieces: Any, *, more: bool) -> None:
        if self.streamed is not None:
            gradients = self.own_gradients
            own = [gradients[each] for each in pieces]
            turned = torch.cat(own[::-1]).split(list(map(len, own)))
            gradients |= zip(pieces, turned, strict=True)
        original(self, pieces, more=more)

    around("loongplug.hetero.executed_step:ExecutedStep._backward", turned)


@pytest.mark.parametrize(
    "fault",
    [
        partial(freely, fault=swap_two_microbatches_gradients),
        partial(freely, fault=give_a_gradient_to_the_wrong_owner),
        turn_gradients_within_passes,
    ],
)
def test_gradients_that_go_astray(pair: Pair, fault: Mutation) -> None:
    comparison = pair.compared(fault)
    fails = [each for each in comparison.tensors if each.fails and each.step is not None]
    first = min((each.step for each in fails), default=None)  # a step may be separated
    assert {each.module for each in fails if each.step == first} == SEES
    assert failing(comparison, "gradients") >= SEES


def test_gradients_that_go_astray_are_of_one_encoder(tmp_path: Path) -> None:
    """Of two, the one that streams; in the first step, before weights differ."""
    both = Pair(made_plan(tmp_path, *STREAMED, *PP2, model=OMNI, steps=1), tmp_path)
    both.agreeing()
    assert failing(both.compared(turn_gradients_within_passes), "gradients") == SEES
