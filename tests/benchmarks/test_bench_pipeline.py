"""The bench with stages that sleep: arithmetic, picture, and steps as long as they shall be."""

from dataclasses import replace

import pytest
from bench import bench
from modes.pipeline import draw, measure
from modes.pipeline_clock import predicted
from modes.pipeline_figures import CaseFigures
from modes.pipeline_work import MODES, Case, PacedEncoder, parse_encoder, parse_stages
from typer.testing import CliRunner

from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.partition.clock import StageTime, step_time
from loongplug.verify.forked_runs import preload

OWN_RANKS, STREAMED = "own_ranks", "streamed"
FULL = "full_hetero_dp"
STAGE = StageTime(forward=10, backward=20)
SEEING = PacedEncoder(name="eyes", time=StageTime(forward=6, backward=12))
HEARING = replace(SEEING, name="ears")


def case(mode: str, *, pp: int = 2, encoders=(SEEING,), microbatches: int = 4, **options) -> Case:
    return Case(
        mode=mode,
        stages=(STAGE,) * pp,
        encoders=tuple(encoders),
        microbatches=microbatches,
        **options,
    )


def frozen(encoder: PacedEncoder) -> PacedEncoder:
    return PacedEncoder(name=encoder.name, time=StageTime(forward=encoder.time.forward, backward=0))


@pytest.mark.quick
def test_options_are_times():
    assert parse_stages("10/20", pp=3) == (STAGE,) * 3
    assert parse_stages("10/20,1.5/0", pp=2) == (STAGE, StageTime(forward=1.5, backward=0))
    assert parse_encoder("eyes=6/12") == SEEING
    assert parse_encoder("eyes=6/12x3").replicas == 3
    assert parse_encoder("eyes=6/12p2") == replace(SEEING, stages=2)
    assert parse_encoder("eyes=6/12x3p2") == replace(SEEING, replicas=3, stages=2)


@pytest.mark.quick
@pytest.mark.parametrize("text", ["10", "10/20/30", "a/b", "-1/2", "nan/1", "inf/1", "", "1e9/1"])
def test_what_are_no_times_is_one_sentence(text):
    with pytest.raises(ValueError, match="expected the milliseconds") as caught:
        parse_stages(text, pp=1)
    assert str(caught.value).count(".") == 1


@pytest.mark.quick
@pytest.mark.parametrize("text", ["6/12", "=6/12", "e.1=6/12", "eyes", "eyes=6/12x0"])
def test_what_is_no_encoder_is_one_sentence(text):
    with pytest.raises(ValueError, match=r"expected NAME=FORWARD/BACKWARD|the milliseconds"):
        parse_encoder(text)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "--mode fast: expected one of uniform, "),
        ({"mode": "uniform", "encoders": [SEEING, SEEING]}, "two modules of the model are called"),
        ({"mode": "uniform", "microbatches": 0}, "--microbatches is 0"),
        ({"mode": "uniform", "tp": 0}, "--tp is 0"),
        ({"mode": "uniform", "chunks": 0}, "--virtual-stages is 0"),
        ({"mode": "uniform", "pp": 1, "chunks": 2}, "expected two stages or more"),
        ({"mode": "uniform", "microbatches": 3, "chunks": 2}, "a multiple of their number"),
        ({"mode": STREAMED, "encoders": [SEEING, HEARING]}, "streamed with 2 encoders"),
        ({"mode": STREAMED, "pp": 1}, "and --pp 1: expected one encoder, and two stages"),
    ],
)
def test_cases_that_cannot_be_run(options, said):
    with pytest.raises(ValueError, match=said):
        case(**options)


@pytest.mark.quick
def test_the_clock_agrees_with_steps_by_hand():
    """1F1B of p equal stages takes (m + p - 1) times forward and backward."""
    assert predicted(case("uniform", encoders=[])) == 5 * 30
    # Stage 0: F0 0-16, F1 16-32, B0 46-78, and from there on no wait. Stage 1: F0 16-26, B0 26-46.
    assert predicted(case("uniform")) == 4 * 48 + 14
    # Half of the encoder: F0 0-13, F1 13-26, B0 43-69, F2 69-82, B1 82-108, F3 108-121, B2 121-147,
    # B3 151-177, which stage 1 does from 121 to 151.
    assert predicted(case("uniform", tp=2)) == 177
    # Encoded at 0 and at 66, behind B0; the encoder's backward within B1 and B3.
    assert predicted(case("encoder_hetero_dp", tp=2)) == 186
    # Two units to each of two ranks, before the schedule and behind it.
    assert predicted(case("full_hetero_dp")) == 5 * 30 + 2 * 18
    assert predicted(case("full_hetero_dp", tp=2, microbatches=5)) == 6 * 30 + 2 * 18
    # A stage more of half the time, where two replicas share each microbatch.
    two = PacedEncoder(name="eyes", time=StageTime(forward=20, backward=40), replicas=2)
    assert predicted(case(OWN_RANKS, encoders=[two])) == 6 * 30
    # With virtual stages, half of the bubble.
    assert predicted(case("uniform", encoders=[], chunks=2)) == 4 * 30 + 15
    assert predicted(case("full_hetero_dp", chunks=2)) == 4 * 30 + 15 + 2 * 18


@pytest.mark.quick
def test_the_clock_is_that_of_partition_where_no_send_waits_long():
    """Of figure 4(a) of the MIMO paper with one stage each, and of stages that are unequal."""
    pair = [PacedEncoder(name="eyes", time=STAGE), PacedEncoder(name="ears", time=STAGE)]
    alone = case(OWN_RANKS, pp=3, encoders=pair, microbatches=24)
    free = step_time([STAGE] * 3, microbatches=24, encoders=[[STAGE]] * 2)
    assert predicted(alone) == free == (24 + 3) * 30
    # The figure itself: the first encoder has two stages.
    deep = PacedEncoder(name="eyes", time=StageTime(forward=20, backward=40), stages=2)
    alone = case(OWN_RANKS, pp=3, encoders=[deep, pair[1]], microbatches=24)
    free = step_time([STAGE] * 3, microbatches=24, encoders=[[STAGE] * 2, [STAGE]])
    assert (predicted(alone), alone.ranks) == (free, 6)
    # Replicas of stages, tensor parallel ones, and beside them an encoder that does not train.
    deep = replace(deep, replicas=2, tp=2)
    wide = case(OWN_RANKS, pp=3, encoders=[deep, frozen(pair[1])], microbatches=24, chunks=2)
    assert wide.ranks == 3 + 2 * 2 * 2 + 1
    free = step_time(
        [StageTime(forward=5, backward=10)] * 6,
        microbatches=24,
        encoders=[[StageTime(forward=2.5, backward=5)] * 2, [StageTime(forward=10, backward=0)]],
        pipeline=Pipeline(stages=3, stage=0, chunks=2, group=3),
    )
    assert free <= predicted(wide) <= 1.03 * free
    for slow_stage in range(4):
        stages = [STAGE] * 4
        stages[slow_stage] = StageTime(forward=17, backward=31)
        row = Case(mode="uniform", stages=tuple(stages), microbatches=12)
        free = step_time(stages, microbatches=12)
        assert free <= predicted(row) <= 1.03 * free


def test_a_picture_of_someone_else_is_no_place_for_one(tmp_path):
    (tmp_path / "uniform.png").write_bytes(b"\x89PNG")
    options = ["--mode", "uniform", "--pictures", str(tmp_path)]
    result = CliRunner().invoke(bench, ["pipeline", *options])
    assert result.exit_code == 1
    assert "uniform.png is there and would be lost" in result.output


def counted(figures: CaseFigures, phase: str) -> list[int]:
    """How often each rank did something in the shown step."""
    return [sum(each.phase == phase for each in trace.events) for trace in figures.shown]


SLOW = StageTime(forward=60, backward=120)  # beside which a busy machine's delays are small


def slow(mode: str) -> Case:
    encoder = PacedEncoder(name="eyes", time=SLOW)
    return Case(mode=mode, stages=(SLOW, SLOW), encoders=(encoder,), microbatches=4)


def test_two_ranks_take_as_long_as_the_clock_says(tmp_path):
    preload("cpu")
    uniform, separated = measure([slow("uniform"), slow("full_hetero_dp")], steps=2)
    for each in (uniform, separated):
        clock = predicted(each.case)
        assert 0.99 * clock <= min(each.step) <= 1.15 * clock
        assert counted(each, "forward") == counted(each, "backward") == [4, 4]
    # The modes are further from each other than from the clock.
    assert predicted(uniform.case) >= 1.17 * predicted(separated.case)
    assert counted(uniform, "encoder_backward") == [4, 0]
    assert counted(separated, "encoder_backward") == [2, 2]
    assert uniform.work == (4 * 360, 4 * 180)
    assert separated.work == (1080, 1080)
    assert uniform.bubbles[0] + 0.3 < uniform.bubbles[1]
    assert separated.bubbles[0] == pytest.approx(separated.bubbles[1], abs=0.1)
    draw([separated], tmp_path / "pictures")
    assert (tmp_path / "pictures" / "full_hetero_dp.png").stat().st_size > 1000


@pytest.mark.sweep
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_does_all_work(mode, chunks):
    """Each unit is encoded once, or by all ranks that share it; nobody hangs."""
    preload("cpu")
    pair = PacedEncoder(name="eyes", time=STAGE, replicas=2, stages=2)
    here = case(
        mode, tp=2, encoders=[pair, frozen(PacedEncoder(name="ears", time=STAGE))], chunks=chunks
    )
    (found,) = measure([here], steps=1)
    assert sum(found.work) == pytest.approx(4 * (4 * 30 + 30 + 10))
    assert found.median >= 0.99 * predicted(here)


def fifth(mode: str) -> Case:
    """Eight stages; a fifth of all work is the encoder's."""
    stage = StageTime(forward=60, backward=120)
    encoder = PacedEncoder(name="eyes", time=StageTime(forward=120, backward=240))
    return Case(mode=mode, stages=(stage,) * 8, encoders=(encoder,), microbatches=16)


def test_eight_ranks_fill_their_bubbles():
    preload("cpu")
    found, separated = measure([fifth(STREAMED), fifth("full_hetero_dp")], steps=2)
    assert predicted(found.case) < 0.9 * predicted(separated.case)
    assert 0.99 * predicted(found.case) <= min(found.step) < 0.97 * min(separated.step)
    assert sum(found.work) == pytest.approx(16 * (8 * 180 + 360))
    assert sum(counted(found, "encoder_forward")) == sum(counted(found, "encoder_backward")) == 64
    assert counted(found, "forward") == counted(found, "backward") == [16] * 8


def test_an_encoder_fills_the_bubbles_of_two_ranks_to_a_stage():
    """Its media are encoded by all, as the plan has it."""
    preload("cpu")
    encoder = PacedEncoder(name="eyes", time=StageTime(forward=120, backward=240))
    stages = (StageTime(forward=90, backward=180),) * 2
    here = Case(mode=STREAMED, stages=stages, encoders=(encoder,), microbatches=8, tp=2)
    (found,) = measure([here], steps=2)
    assert sum(found.work) == pytest.approx(8 * (4 * 270 + 360))
    clock = predicted(here)
    assert 0.97 * clock <= min(found.step) <= 1.2 * clock
    assert clock < 0.97 * predicted(replace(here, mode=FULL))
    assert counted(found, "forward") == counted(found, "backward") == [8] * 4
    assert all(counted(found, "encoder_forward"))
    assert all(counted(found, "encoder_backward"))


@pytest.mark.parametrize("trains", [False, True])
def test_virtual_stages_fill_their_bubbles(trains):
    preload("cpu")
    encoder = SEEING if trains else frozen(SEEING)
    (found,) = measure([case(STREAMED, pp=2, encoders=[encoder], chunks=2)], steps=1)
    assert sum(found.work) == pytest.approx(4 * (2 * 30 + 6 + 12 * trains))
    assert found.median >= 0.99 * predicted(found.case)
    assert any(counted(found, "encoder_backward")) == trains
