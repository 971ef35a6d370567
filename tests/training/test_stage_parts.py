"""What each stage is given of a microbatch, in whole runs: what it consumes, and nothing else."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from image_units import unit_of
from ranks import run_ranks

from loongplug.data import loader
from loongplug.data.dataset import Sample
from loongplug.data.microbatch import ALL_TEXT, Microbatch, TextNeeds
from loongplug.models.decoder import TextDecoder
from loongplug.training.run import run

VIRTUAL = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
MOE = ("--model-name", "qwen3_vl_moe_tiny", "--use-distributed-optimizer")
BALANCED = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2")

# What was there, of: ids, labels, loss mask, vision.
FIRST, MIDDLE, LAST = ("ids", "vision"), (), ("labels", "loss mask")
WHOLE = ("ids", "labels", "loss mask", "vision")


def kinds(microbatch: Any) -> tuple[str, ...]:
    values = {
        "ids": microbatch.input_ids,
        "labels": microbatch.labels,
        "loss mask": microbatch.loss_mask,
        "vision": unit_of(microbatch).media,
    }
    return tuple(name for name, value in values.items() if value is not None)


def given(rank: int, *, flags: list[str], whole: bool = False) -> dict[str, Any]:
    """A run's losses, what its loaders built, and what each chunk's decoder was called with.

    With ``whole``, every stage is given everything, as if all consumed all.
    """
    built: Counter[tuple[str, ...]] = Counter()
    taken: dict[int, Counter[tuple[str, ...]]] = {}
    original, forward = loader.collate, TextDecoder.forward
    if whole:
        TextNeeds.of_stage = classmethod(lambda cls, **_: ALL_TEXT)

    def collate(samples: Sequence[Sample], **options: Any) -> tuple[Microbatch, ...]:
        chunks = original(samples, **options)
        kinds_of_any = {kind for microbatch in chunks for kind in kinds(microbatch)}
        built[tuple(kind for kind in WHOLE if kind in kinds_of_any)] += 1
        (length,) = {each.split.length for each in chunks}
        assert all(each.position_ids.shape == (3, 2, length) for each in chunks)
        return chunks

    def decode(self: TextDecoder, input_ids: Any, position_ids: Any, **kwargs: Any) -> Any:
        assert position_ids.shape[0] == 3
        got = {
            "ids": input_ids,
            "labels": kwargs["labels"],
            "loss mask": kwargs["loss_mask"],
            "vision": kwargs["placed"] or None,
        }
        counts = taken.setdefault(self.vp_stage or 0, Counter())
        counts[tuple(name for name, value in got.items() if value is not None)] += 1
        return forward(self, input_ids, position_ids, **kwargs)

    loader.collate, TextDecoder.forward = collate, decode
    losses = [(step.loss, step.tokens, step.fill_rate) for step in run(flags)]
    return {"losses": losses, "built": dict(built), "taken": {k: dict(v) for k, v in taken.items()}}


def ran(flags: list[str], ranks: int, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(given, ranks, flags=flags, timeout=150.0, **options)


# 2 steps of 4 microbatches, and 2 evaluations of 4: after each step, the last of them once.
TIMES = 16
RUN = ("--train-iters", "2", "--eval-iters", "1", "--eval-interval", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "by_rank"),
    [
        ((), 1, [[WHOLE]]),
        (VIRTUAL, 2, [[FIRST, MIDDLE], [MIDDLE, LAST]]),
    ],
    ids=["one-rank", "pp2-vpp2"],
)
def test_a_stage_is_given_what_it_consumes(flags, demo, layout, ranks, by_rank):
    valid = ("--valid-data-path", str(demo / "test.jsonl"))
    flags = [*flags, *RUN, *valid, *layout]
    found = ran(flags, ranks)
    for each, chunks in zip(found, by_rank, strict=True):
        rest = {number: {kind: TIMES} for number, kind in enumerate(chunks)}
        assert each["taken"] == rest
        (built,) = each["built"]
        assert set(built) == {name for kind in chunks for name in kind}
        assert each["built"][built] >= TIMES
    # The numbers are those of microbatches that have everything, to the last bit.
    expected = ran(flags, ranks, whole=True)
    assert [each["losses"] for each in found] == [each["losses"] for each in expected]
    assert all(set(each["built"]) <= {WHOLE, WHOLE[:3]} for each in expected)


@pytest.mark.slow
def test_routers_that_balance_know_what_counts_on_every_stage(flags):
    by_rank = [[("ids", "loss mask", "vision"), LAST[1:]], [LAST[1:], LAST]]
    flags = [*flags, *MOE, "--train-iters", "2", *VIRTUAL]
    balanced = [*flags, *BALANCED]
    found = ran(balanced, 2)
    for each, chunks in zip(found, by_rank, strict=True):
        assert each["taken"] == {number: {kind: 8} for number, kind in enumerate(chunks)}
    expected = ran(balanced, 2, whole=True)
    assert [each["losses"] for each in found] == [each["losses"] for each in expected]
    plain = ran([*flags, "--moe-router-load-balancing-type", "none"], 2)
    assert all("loss mask" not in kind for kind in plain[0]["built"])
