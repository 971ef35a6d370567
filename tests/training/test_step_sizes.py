"""Sizes of steps ahead of time, against the calculator that Megatron asks before each step."""

from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from command_lines import command_line
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from loongplug.checkpoint.resume_checks import checked_rates
from loongplug.data.sample_order import StepSizes
from loongplug.training.arguments import parse_arguments
from loongplug.training.step_sizes import _count_samples, parsed_schedule, step_sizes

pytestmark = pytest.mark.quick


def megatron(sizes: StepSizes, *, each: int) -> Any:
    return StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=each,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=-1,
        schedule=sizes.schedule(seq_length=7),
        seq_length=7,
    )


@st.composite
def growing(draw: st.DrawFn) -> tuple[StepSizes, int]:
    """Any sizes that grow, and samples of a microbatch that all of them divide by."""
    each = draw(st.integers(1, 6))
    counts = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))
    begins = sorted(
        draw(st.sets(st.integers(1, 200), min_size=len(counts) - 1, max_size=len(counts) - 1))
    )
    pairs = zip((0, *begins), (each * count for count in counts), strict=True)
    return StepSizes(sizes=tuple(pairs)), each


@given(made=growing(), resumed=st.integers(0, 300))
def test_steps_are_those_that_megatron_makes(made: tuple[StepSizes, int], resumed: int) -> None:
    """Of a run that resumes behind any number of microbatches, until they grow no more."""
    sizes, each = made
    consumed = resumed * each
    calculator, steps = megatron(sizes, each=each), sizes.microbatches(each=each, consumed=consumed)
    for step in range(220):
        assert resumed or sizes.samples(step) == consumed
        calculator.update(consumed, consistency_check=True)
        count = calculator.get()
        assert next(steps) == count
        consumed += count * each
    assert count * each == sizes.largest


def test_a_schedule_is_read_in_any_order_and_with_suffixes() -> None:
    found = parsed_schedule("640:8 0:4 6.4K:20", seq_length=64)
    assert found == StepSizes(sizes=((0, 4), (10, 8), (100, 20)))


@given(made=growing(), before=st.integers(0, 40), steps=st.integers(1, 30))
def test_a_run_resumed_anywhere_goes_on_with_the_steps_of_the_whole(
    made: tuple[StepSizes, int], before: int, steps: int
) -> None:
    """By step and by samples."""
    sizes, each = made
    whole = list(islice(sizes.microbatches(each=each), before + steps))
    consumed = sum(whole[:before]) * each
    assert consumed == sizes.samples(before)
    resumed = sizes.microbatches(each=each, consumed=consumed)
    assert list(islice(resumed, steps)) == whole[before:]
    assert sizes.at(consumed) == whole[before] * each


@given(made=growing(), samples=st.integers(1, 2000))
def test_the_fewest_steps_that_take_so_many_samples(
    made: tuple[StepSizes, int], samples: int
) -> None:
    sizes, each = made
    steps = sizes.steps(samples, each=each)
    assert sizes.samples(steps - 1) < samples <= sizes.samples(steps)


def test_what_is_no_whole_microbatch_is_not_among_the_samples_of_a_step() -> None:
    assert StepSizes.constant(7).steps(12, each=3) == 2
    assert StepSizes.constant(7).steps(13, each=3) == 3


@pytest.mark.parametrize(
    ("start", "increment", "samples", "end"), [(4, 2, 30, 14), (3, 3, 7, 24), (4, 4, 0, 12)]
)
def test_a_ramp_has_equal_parts(start: int, increment: int, samples: int, end: int) -> None:
    sizes = StepSizes.ramp(start=start, increment=increment, samples=samples, end=end)
    each_part = samples / ((end - start) / increment)
    for consumed in range(samples):
        expected = start + int(consumed / each_part) * increment
        assert sizes.at(consumed) == expected
    assert sizes.at(samples) == end


def test_both_flags_come_to_what_megatron_s_loop_reads(tmp_path: Path) -> None:
    def settled(*more: str) -> Namespace:
        return parse_arguments(command_line(tmp_path, *more)).args

    ramp = settled("--rampup-batch-size", "4", "2", "20")
    assert ramp.step_batch_size_schedule == "0:4 640:6 1280:8"
    assert (ramp.global_batch_size, ramp.eval_global_batch_size) == (8, 8)
    sizes = step_sizes(ramp)
    assert sizes == StepSizes(sizes=((0, 4), (10, 6), (20, 8)))
    line = command_line(tmp_path, "--step-batch-size-schedule", "0:4 640:6 1280:8")
    at = line.index("--global-batch-size")
    same = parse_arguments([*line[:at], *line[at + 2 :]]).args
    assert step_sizes(same) == sizes
    assert (same.global_batch_size, same.eval_global_batch_size) == (8, 8)
    own = settled("--eval-global-batch-size", "6", "--eval-micro-batch-size", "3")
    assert (own.eval_global_batch_size, own.eval_micro_batch_size) == (6, 3)
    fewer = settled("--global-batch-size", "7", "--decrease-batch-size-if-needed")
    assert (fewer.global_batch_size, fewer.eval_global_batch_size) == (7, 6)
    assert step_sizes(settled("--rampup-batch-size", "8", "2", "9")) == StepSizes.constant(8)


def scheduler(**changes: Any) -> OptimizerParamScheduler:
    settings: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 16,
        "lr_decay_steps": 80,
        "lr_decay_style": "linear",
        "start_wd": 0.1,
        "end_wd": 0.3,
        "wd_incr_steps": 80,
        "wd_incr_style": "linear",
        "use_checkpoint_opt_param_scheduler": False,
    }
    optimizer = Namespace(param_groups=[{}])
    return OptimizerParamScheduler(optimizer, **(settings | changes))


@pytest.mark.parametrize("fraction", [None, 0.5])
@pytest.mark.parametrize("style", ["linear", "WSD"])
def test_rates_end_with_the_iterations_that_flags_name(style: str, fraction: float | None) -> None:
    """Upstream's scheduler for 10 iterations of 8 samples, in a run that starts with fewer."""
    sizes = StepSizes(sizes=((0, 2), (7, 4), (12, 8)))  # 2 2 2 2 4 8 8 ...
    made = scheduler(lr_decay_style=style, wsd_decay_steps=16, lr_wsd_decay_style="linear")
    args = Namespace(
        lr_decay_iters=8,
        train_iters=10,
        lr_warmup_iters=2,
        lr_wsd_decay_iters=2,
        lr_warmup_fraction=fraction,
    )
    _count_samples(made, args, sizes)
    rates, decays = [], []
    for step in range(12):
        rates.append(made.get_lr({}))
        decays.append(made.get_wd({}))
        made.step(sizes.samples(step + 1) - sizes.samples(step))
    assert decays[9] < 0.29
    assert decays[10] == pytest.approx(0.3)
    assert rates[8:] == pytest.approx([0.1] * 4)
    assert rates[7] > 0.15
    warm = 2 if fraction is None else 6  # of 28 samples, 14 are a half
    assert rates[warm - 1] < 0.99
    assert (rates[2] == 1.0) == (fraction is None)
    if style == "WSD":
        assert rates[6] == (1.0 if fraction is None else pytest.approx(1.0))


def test_other_rates_than_the_checkpoint_s_are_refused_unless_one_is_chosen() -> None:
    saved = scheduler().state_dict() | {"num_steps": 8}
    load = checked_rates(OptimizerParamScheduler.load_state_dict)
    load(scheduler(), saved)
    longer = {"lr_decay_steps": 160, "wd_incr_steps": 160}
    shorter = {"lr_decay_steps": 40, "wd_incr_steps": 40}
    with pytest.raises(ValueError, match=r"lr_decay_steps was 80, is 40 .*--train") as raised:
        load(scheduler(**shorter, max_lr=2.0), saved)
    said = str(raised.value)
    assert "max_lr was 1.0, is 2.0 (--lr)" in said
    assert "--override-opt-param-scheduler" in said
    assert "--use-checkpoint-opt-param-scheduler" in said
    own = scheduler(**longer, override_opt_param_scheduler=True)
    load(own, saved)
    assert (own.lr_decay_steps, own.num_steps) == (160, 8)
    with pytest.raises(ValueError, match=r"max_lr was 1.0, is 2.0 \(--lr\)\. Give"):
        load(scheduler(**longer, max_lr=2.0), saved)
    as_saved = scheduler(**longer, use_checkpoint_opt_param_scheduler=True)
    load(as_saved, saved)
    assert as_saved.lr_decay_steps == 80


@pytest.mark.parametrize(
    ("done", "told"),
    [(40, "at 0.85, and was 0.662"), (8, "at 0.5, where it was"), (100, "at 0.475, and was 0.1")],
)
def test_a_longer_run_goes_on_by_its_own_course(
    done: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if it had been planned so from the start; the same as with the flag, told on one line."""
    load = checked_rates(OptimizerParamScheduler.load_state_dict)
    saved = scheduler().state_dict() | {"num_steps": done}
    longer = {"lr_decay_steps": 160, "wd_incr_steps": 160}
    extended, asked = scheduler(**longer), scheduler(**longer, override_opt_param_scheduler=True)
    load(asked, saved)
    assert capsys.readouterr().err == ""
    load(extended, saved)
    assert extended.state_dict() == asked.state_dict()
    assert extended.get_lr({}) == asked.get_lr({})
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "(linear) ends at sample 160, not 80; it goes on" in said
    assert told in said


def test_a_warm_up_that_is_a_share_may_change_with_the_length_once_it_is_over() -> None:
    load = checked_rates(OptimizerParamScheduler.load_state_dict)
    longer = {"lr_decay_steps": 160, "wd_incr_steps": 160, "lr_warmup_steps": 32}
    load(made := scheduler(**longer), scheduler().state_dict() | {"num_steps": 32})
    assert (made.lr_warmup_steps, made.lr_decay_steps) == (32, 160)
    with pytest.raises(ValueError, match="lr_warmup_steps was 16, is 32"):
        load(scheduler(**longer), scheduler().state_dict() | {"num_steps": 31})


def test_the_checkpoint_s_weight_decay_is_that_of_the_first_step() -> None:
    """Upstream sets the groups' before it has read it."""
    load = checked_rates(OptimizerParamScheduler.load_state_dict)
    saved = scheduler(start_wd=0.2, end_wd=0.2).state_dict() | {"num_steps": 8}
    for use, decay in ((True, 0.2), (False, 0.1)):
        flags = {f"{'use_checkpoint' if use else 'override'}_opt_param_scheduler": True}
        found = scheduler(start_wd=0.1, end_wd=0.1, **flags)
        load(found, saved)
        assert {group["weight_decay"] for group in found.optimizer.param_groups} == {decay}
