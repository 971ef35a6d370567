"""What single wrapped functions report: bytes, groups, numbers of microbatches."""

import pytest
import torch
import torch.distributed as dist
from ranks import model_parallel, run_ranks

from loongplug.observe.hooks import PAYLOADS, ReportedWork, StepHooks, reported
from loongplug.observe.recorder import TraceRecorder


def hooks_and_events():
    events: list = []
    recorder = TraceRecorder(lambda more: events.extend(more))
    return StepHooks(recorder, on_first_model=lambda: None), recorder, events


def of_collectives(rank: int) -> list[tuple]:
    from megatron.core import parallel_state

    hooks, recorder, events = hooks_and_events()
    call = {name: reported(getattr(dist, name), hooks.collective(name)) for name in PAYLOADS}
    with model_parallel(tp=2):
        tp = parallel_state.get_tensor_model_parallel_group()
        share, whole = torch.ones(3), torch.zeros(6)
        call["all_reduce"](share)
        call["all_reduce"](share.double(), group=tp)
        assert share.tolist() == [2.0] * 3
        work = call["all_reduce"](share, dist.ReduceOp.SUM, tp, True)
        assert isinstance(work, ReportedWork)
        work.wait()
        assert work.is_completed()
        assert share.tolist() == [4.0] * 3
        call["all_gather_into_tensor"](whole, share, group=tp)
        call["all_gather"]([torch.empty(3), torch.empty(3)], share, group=tp)
        call["reduce_scatter_tensor"](share, whole, group=tp)
        call["all_to_all_single"](torch.empty(2), torch.ones(2), group=tp)
        call["broadcast"](whole.half(), 0)
        if rank == 0:
            assert call["send"](share, 1) is None
        else:
            assert call["recv"](share, 0) == 0
        call["barrier"]()
        single = dist.new_group([0])
        call["all_reduce"](share, group=single)  # rank 1 is not in it, and does nothing
    recorder.close()
    return [
        (each.phase, each.name, each.details.get("bytes"), each.details.get("group"))
        for each in events
    ]


def test_collectives_report_their_bytes_and_their_group():
    tp, world = "tensor_model_parallel", "world"
    expected = [
        ("collective", "all_reduce", 12, world),
        ("collective", "all_reduce", 24, tp),
        ("collective", "all_reduce", 12, tp),
        ("wait", "all_reduce", None, None),
        ("collective", "all_gather_into_tensor", 24, tp),
        ("collective", "all_gather", 24, tp),
        ("collective", "reduce_scatter_tensor", 24, tp),
        ("collective", "all_to_all_single", 8, tp),
        ("collective", "broadcast", 12, world),
    ]
    first, second = run_ranks(of_collectives, 2)
    assert first[:-1] == [
        *expected,
        ("collective", "send", 12, world),
        ("collective", "barrier", 0, world),
    ]
    assert first[-1][:3] == ("collective", "all_reduce", 12)
    assert second == [
        *expected,
        ("collective", "recv", 12, world),
        ("collective", "barrier", 0, world),
    ]


@pytest.mark.quick
def test_a_backward_has_the_numbers_of_its_forward():
    hooks, recorder, events = hooks_and_events()

    def step(data_iterator, output, current_microbatch=None, vp_stage=None):
        return output, 1

    forward = reported(step, hooks.forward_step)
    backward = reported(lambda input_tensor, output_tensor: "gradient", hooks.backward_step)
    outputs = [torch.zeros(1), [torch.zeros(1)], torch.zeros(1)]
    for number, output in enumerate(outputs):
        given = forward(None, output, current_microbatch=number, vp_stage=number)
        assert given[0] is output
    for number in (1, 2, 0):
        # The schedule may hold a tensor in a list that the forward did not give so.
        output = [outputs[number]] if number == 0 else outputs[number]
        assert backward(None, output) == "gradient"
    with torch.no_grad():
        forward(None, outputs[0], current_microbatch=9)
    backward(None, outputs[0])
    recorder.close()
    numbers = [(each.details["microbatch"], each.details["chunk"]) for each in events]
    assert numbers == [(0, 0), (1, 1), (2, 2), (1, 1), (2, 2), (0, 0), (9, 0), (None, None)]


@pytest.mark.quick
def test_the_combined_step_tells_both_microbatches():
    hooks, recorder, events = hooks_and_events()
    outputs = iter([torch.zeros(1), torch.zeros(1)])

    def combined(f_model, b_model, b_output_tensor, f_model_chunk_id=None, current_microbatch=None):
        return (next(outputs) if f_model else None), 1, None

    step = reported(combined, hooks.combined_step)
    first, *_ = step("f", None, None, 1, current_microbatch=0)
    second, *_ = step("f", "b", first, f_model_chunk_id=0, current_microbatch=1)
    step(None, "b", [second])
    recorder.close()
    assert [each.details for each in events] == [
        {"microbatch": 0, "chunk": 1},
        {"microbatch": 1, "chunk": 0, "backward_microbatch": 0, "backward_chunk": 1},
        {"backward_microbatch": 1, "backward_chunk": 0},
    ]


@pytest.mark.quick
def test_the_wait_for_data_is_reported_within_the_forward():
    hooks, recorder, events = hooks_and_events()

    def step(data_iterator, current_microbatch=None, vp_stage=None):
        assert iter(data_iterator) is data_iterator
        return next(data_iterator), 1

    forward = reported(step, hooks.forward_step)
    assert forward(iter(["microbatch"]), current_microbatch=4)[0] == "microbatch"
    recorder.close()
    assert [(each.phase, each.details["microbatch"]) for each in events] == [
        ("data", 4),
        ("forward", 4),
    ]
