"""The recorder, and the device's clock by stand-ins for CUDA events."""

import time

import numpy as np
import pytest
import torch

from loongplug.observe.recorder import TraceRecorder

pytestmark = pytest.mark.quick


def recorded():
    written: list = []
    return TraceRecorder(lambda events: written.extend(events)), written


def test_events_are_written_at_the_end_of_their_step():
    recorder, written = recorded()
    begun = time.time_ns()
    with recorder.in_step(3):
        with recorder.span("forward", "forward", microbatch=1) as outer:
            with recorder.span("data", "next"):
                pass
            recorder.mark("switch", "image_encoder")
            outer.note(bytes=8)
        assert written == []
    recorder.mark("switch", "text_decoder")
    assert [(each.phase, each.step) for each in written] == [
        ("data", 3),
        ("switch", 3),
        ("forward", 3),
        ("step", 3),
    ]
    assert written[2].details == {"microbatch": 1, "bytes": 8}
    data, _, forward, step = written
    assert begun - 1e6 < step.start <= step.end < time.time_ns() + 1e6
    assert step.start <= forward.start <= data.start <= data.end <= forward.end <= step.end
    recorder.close()
    assert (written[-1].name, written[-1].step) == ("text_decoder", None)


def test_what_an_exception_ends_is_told():
    recorder, written = recorded()
    with pytest.raises(KeyError), recorder.in_step(1), recorder.span("forward", "f"):
        raise KeyError
    assert [(each.phase, each.details) for each in written] == [
        ("forward", {"failed": True}),
        ("step", {"failed": True}),
    ]
    assert recorder.step is None


def test_few_events_are_held_however_long_a_step_is():
    recorder, written = recorded()
    with recorder.in_step(1):
        for _ in range(10_000):
            recorder.mark("switch", "x")
        assert len(written) >= 10_000 - 4096


class Device:
    """A device that does what it was given when told, and knows times in float32 milliseconds."""

    def __init__(self):
        self.given = 0.0  # milliseconds at which the work given so far will be done
        self.done = 0.0  # milliseconds
        self.waits = 0

    def synchronize(self):
        self.waits += 1
        self.done = self.given

    def event(self, *, enable_timing):
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.given

    def query(self):
        return self.at <= self.device.done

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "CUDA raises for an event that was not reached"
        return float(np.float32(end.at - self.at))


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    return device


def on(device):
    recorder, written = recorded()
    recorder.use_device_clock()
    device.waits = 0
    return recorder, written


def test_the_device_is_not_waited_for(device):
    recorder, written = on(device)
    for step in (1, 2, 3):
        with recorder.in_step(step), recorder.span("forward", "f"):
            device.given += 10
        assert device.waits == 0
        # The device is one step behind.
        assert {each.step for each in written} == set(range(1, step))
        device.done = device.given
    recorder.close()
    assert device.waits == 1
    forwards = [each for each in written if each.phase == "forward"]
    assert [each.end - each.start for each in forwards] == [10_000_000] * 3
    assert forwards[2].start - forwards[0].start == 20_000_000


def test_times_stay_fine_over_a_long_run(device):
    """Microseconds after ten hours, which float32 milliseconds from the start cannot hold."""
    recorder, written = on(device)
    for step in range(1, 3601):
        with recorder.in_step(step):
            device.given += 10_000
            with recorder.span("forward", "f"):
                device.given += 0.013
            with recorder.span("backward", "b"):
                device.given += 0.5
        device.done = device.given
    recorder.close()
    forward, backward, step = written[-3:]
    assert forward.end - forward.start == pytest.approx(13_000, abs=2_000)
    assert backward.end - backward.start == pytest.approx(500_000, abs=2_000)
    assert step.end - written[2].end == pytest.approx(3599 * 10_000.513e6, rel=1e-7)


def test_the_hosts_work_is_timed_on_the_host(device):
    recorder, written = on(device)
    before = time.perf_counter_ns()
    with recorder.in_step(1), recorder.span("data", "next"):
        device.given += 5000
    most = time.perf_counter_ns() - before
    device.done = device.given
    recorder.close()
    data, step = written
    assert step.end - step.start == 5_000_000_000
    assert data.end - data.start <= most
