"""A rank's file: written as it goes, read also when its rank was killed."""

import pytest

from loongplug.observe.trace_file import TraceEvent, TraceWriter, rank_file, read_folder, read_rank

pytestmark = pytest.mark.quick


def event(number: int, **details) -> TraceEvent:
    return TraceEvent(
        phase="forward", name="forward", start=number, end=number + 5, step=2, details=details
    )


def write(folder, *, rank=0, world_size=1, events=()):
    writer = TraceWriter(folder, rank=rank, world_size=world_size, device="cpu")
    writer.place({"tp": 1, "pp": 0})
    writer.write(events)
    return writer


def test_what_was_written_is_read_back(tmp_path):
    events = (event(10**18, microbatch=3, bytes=2**40), event(10**18 + 1, group="a\nb"))
    writer = write(tmp_path, rank=2, world_size=3, events=events)
    trace = read_rank(rank_file(tmp_path, 2))  # on the disk at once, before the file is closed
    writer.close()
    assert trace.events == events
    assert (trace.rank, trace.world_size, trace.device) == (2, 3, "cpu")
    assert trace.label() == "2 tp1 pp0"
    assert not trace.cut_off


def test_a_full_disk_ends_the_trace_in_one_line(tmp_path, caplog):
    rank_file(tmp_path, 0).symlink_to("/dev/full")
    writer = write(tmp_path, events=[event(1)])
    writer.write([event(2)])
    writer.close()
    (line,) = caplog.messages
    assert line.startswith("--trace ends here, the run goes on: ")
    assert "No space left on device" in line


def test_a_cut_off_line_is_left_out_and_told(tmp_path):
    write(tmp_path, events=[event(1), event(2)]).close()
    path = rank_file(tmp_path, 0)
    path.write_text(path.read_text()[:-7])
    trace = read_rank(path)
    assert [each.start for each in trace.events] == [1]
    assert trace.cut_off


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rank": 0}\n{"phase": "for\n{}\n', r"rank_00000\.jsonl:2 is not JSON"),
        ('{"loss": 1}\n', "does not begin with a rank"),
    ],
)
def test_a_file_that_is_damaged_or_no_trace_is_named(tmp_path, text, said):
    rank_file(tmp_path, 0).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_folder(tmp_path)


def test_files_of_different_runs_are_refused(tmp_path):
    write(tmp_path, rank=0, world_size=2).close()
    write(tmp_path, rank=1, world_size=2).close()
    write(tmp_path, rank=5, world_size=8).close()
    with pytest.raises(ValueError, match=r"rank_00005\.jsonl is of a run of 8 ranks"):
        read_folder(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no rank_"):
        read_folder(tmp_path)


def test_a_failed_step_is_not_whole(tmp_path):
    steps = [
        TraceEvent(phase="step", name="step", start=1, end=2, step=1, details={}),
        TraceEvent(phase="step", name="step", start=3, end=4, step=2, details={"failed": True}),
    ]
    write(tmp_path, events=steps).close()
    assert read_rank(rank_file(tmp_path, 0)).whole_steps() == {1}
