"""What a step's plans hold on a rank, by the run's own executor: counts that are known by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loongplug.estimate.estimate import EstimatedStep
from loongplug.estimate.estimator import parsed_for
from loongplug.estimate.microbatches import own_ranks_of, pieces_of, step_of_size
from loongplug.estimate.ranks import as_rank
from loongplug.estimate.tape import (
    ENCODER,
    FEATURE_GRADIENTS,
    FEATURES,
    INPUT,
    STATE_GRADIENTS,
    STATES,
    TRANSIENT,
    Tape,
)
from loongplug.estimate.trace import PassBytes

pytestmark = pytest.mark.quick

KEPT, FORWARD, BACKWARD = 10_000_000, 15_000_000, 7_000_000
TOKENS = 16  # of a sample
RUN = [
    *("--model-name", "qwen3_vl_tiny", "--seq-length", "64", "--micro-batch-size", "1"),
    *("--train-iters", "1", "--lr", "1e-3", "--training-phase", "sft", "--device", "cpu"),
]
NAME = "image_encoder"
OWN, STAGES = "model.image_encoder.rank_offset", "model.image_encoder.pipeline_model_parallel_size"
PP, FULL = "--pipeline-model-parallel-size", "--enable-full-hetero-dp"
SEPARATED = ("--full-hetero-dp-schedule", "separated")
PATCHES = 4 * TOKENS * 3 * 2 * 16 * 16  # numbers of a sample's


class Followed:
    """Steps of ranks whose encoder's passes keep KEPT bytes where they train."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of a tokenizer that stands in

    def __call__(
        self,
        *flags: str,
        ranks: int,
        rank: int = 0,
        microbatches: int,
        trains: Sequence[bool] = (True,),
        keeps: bool = False,
    ) -> tuple[Tape, int]:
        """What was seen of ``rank``, and the bytes of what its encoder makes of a sample.

        ``trains``: by stage, of an encoder on ranks of its own. ``keeps``: passes keep their input.
        """
        size = ("--global-batch-size", str(microbatches))
        parsed = parsed_for([*RUN, *size, *flags], ranks=ranks, stand_ins=self.folder)
        step_of = step_of_size(parsed.args, parsed.model, visual_tokens=TOKENS)
        own, encoder = own_ranks_of(parsed.args, parsed.model), parsed.model.image_encoder
        with as_rank(parsed, rank) as here:
            steps = step_of(0)
            if here.engine.own is not None:
                steps = pieces_of(own[0], step_of, encoder=encoder, packed=False)
            heard = {NAME: trains} if own else {}
            step = EstimatedStep(here, parsed, steps, states={}, traced={}, trains=heard)
            kept = KEPT if any(trains[: here.stage + 1] if own else trains) else 0
            cost = PassBytes(
                kept=kept,
                forward=FORWARD,
                backward=BACKWARD,
                rows=4 * TOKENS,
                keeps_given=keeps,
            )
            step._stand_ins = {
                name: replace(each, blank=PassBytes(), largest=cost)
                for name, each in step._stand_ins.items()
            }
            tape, made = Tape(region=TRANSIENT), 0
            step.follow(tape, rank=rank)
            assert tape.total == 0, f"nobody let go of {tape.live}"
            for stand_in in step._stand_ins.values():
                rows = stand_in.made(encoder.grid_of(TOKENS))
                made = rows * stand_in.width * stand_in.dtype.itemsize
            return tape, made


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def own(*flags: str, decoder: int = 1, stages: int = 1) -> tuple[str, ...]:
    """An encoder behind so many ranks of the decoder."""
    return (f"{OWN}={decoder}", f"{STAGES}={stages}", *flags)


@pytest.mark.parametrize("microbatches", [1, 3, 16])
@pytest.mark.parametrize("stages", [1, 2])
def test_as_many_units_are_in_flight_as_the_plan_s_warmup_says(followed, stages, microbatches):
    """One more than the decoder's first stage has passes before its first backward."""
    flags = own(PP, str(stages), decoder=stages)
    tape, made = followed(*flags, ranks=stages + 1, rank=stages, microbatches=microbatches)
    most, units = tape.highest, min(microbatches, stages + 1)
    assert most[ENCODER] == units * KEPT
    assert most[FEATURE_GRADIENTS] == min(microbatches, 2) * made  # one in use, and one is posted
    assert most[INPUT] == PATCHES * 4  # of the piece in work
    assert made <= most[FEATURES] <= (units + 1) * made
    assert tape.when in ("encoder's forward", "encoder's backward")


def test_an_encoder_without_gradients_is_ahead_by_as_much_as_may_be_sent_at_a_time(followed):
    """What is under way, and what is about to set out."""
    flags = own(PP, "2", decoder=2)
    tape, made = followed(*flags, ranks=3, rank=2, microbatches=8, trains=(False,))
    assert tape.highest[ENCODER] == tape.highest[FEATURE_GRADIENTS] == 0
    assert tape.highest[FEATURES] == (2 + 1 + 1) * made


@pytest.mark.parametrize("trains", [(True, True), (False, True)])
@pytest.mark.parametrize("keeps", [True, False])
def test_states_between_stages_are_there_as_long_as_something_needs_them(followed, trains, keeps):
    flags = own(decoder=1, stages=2)
    first, made = followed(*flags, ranks=3, rank=1, microbatches=8, trains=trains)
    last, _ = followed(*flags, ranks=3, rank=2, microbatches=8, trains=trains, keeps=keeps)
    assert first.highest[ENCODER] == (3 * KEPT if trains[0] else 0)
    assert last.highest[ENCODER] == 2 * KEPT
    assert FEATURES not in +first.highest
    assert INPUT not in +last.highest
    if trains[0]:
        assert first.highest[STATE_GRADIENTS] == 2 * made  # one in use, one received ahead
        assert last.highest[STATE_GRADIENTS] == 2 * made  # what is made, and the one before
        assert last.highest[STATES] == (2 + 2) * made  # of its own units, and two received ahead
    else:
        assert STATE_GRADIENTS not in +first.highest + last.highest
        assert last.highest[STATES] == ((2 if keeps else 1) + 2) * made


def test_the_decoder_s_first_stage_receives_two_microbatches_ahead(followed):
    flags = own(PP, "2", decoder=2)
    features = followed(*flags, ranks=3, rank=2, microbatches=8)[1]
    tape, _ = followed(*flags, ranks=3, rank=0, microbatches=8)
    assert tape.highest[FEATURES] == 3 * features  # while one is taken its own, too
    assert tape.highest[FEATURE_GRADIENTS] == 2 * features  # one is sent while the next is made
    assert ENCODER not in +tape.highest
    frozen, _ = followed(*flags, ranks=3, rank=0, microbatches=8, trains=(False,))
    assert FEATURE_GRADIENTS not in +frozen.highest


@pytest.mark.parametrize("sizes", [("2", "1"), ("2", "2")])
def test_a_step_that_streams_holds_less_at_a_time(followed, sizes):
    pp, tp = sizes
    flags = (FULL, PP, pp, "--tensor-model-parallel-size", tp)
    flags += () if tp == "1" else ("--sequence-parallel",)
    ranks = int(pp) * int(tp)
    for rank in (0, ranks - 1):
        streamed, made = followed(*flags, ranks=ranks, rank=rank, microbatches=16)
        separated, _ = followed(*flags, *SEPARATED, ranks=ranks, rank=rank, microbatches=16)
        assert 0 < streamed.highest[ENCODER] < 16 * KEPT
        assert 0 < streamed.highest[FEATURES] <= 16 * made
        if rank == 0:
            assert streamed.highest[FEATURES] <= separated.highest[FEATURES] <= 16 * made


def test_what_leaves_for_the_host_is_not_there(followed):
    flags = (FULL, PP, "2", *SEPARATED)
    stays, _ = followed(*flags, ranks=2, rank=0, microbatches=8)
    for flag, region in (
        ("--offload-encoder-activations", ENCODER),
        ("--full-hetero-dp-cpu-offload", FEATURES),
    ):
        away, _ = followed(*flags, flag, ranks=2, rank=0, microbatches=8)
        assert 0 < away.highest[region] < stays.highest[region]
