"""A step on the clock as the traces of a run have it, for pictures and Perfetto. Pure."""

from collections.abc import Iterator

from loongplug.observe.trace_file import RankTrace, TraceEvent
from loongplug.simulate.clock import Run
from loongplug.simulate.programs import Programs, Time, Work

STEP = 1


def traces(run: Run, programs: Programs, *, nanoseconds: float = 1.0) -> list[RankTrace]:
    """Traces of all ranks; a unit of the clock is so many ``nanoseconds``."""

    def at(time: Time) -> int:
        return round(time * nanoseconds)

    def events(rank: int) -> Iterator[TraceEvent]:
        yield TraceEvent(
            phase="step", name="step", start=0, end=at(run.step), step=STEP, details={}
        )
        for span in run.spans[rank]:
            work = programs.ranks[rank][span.act]
            assert isinstance(work, Work)
            label = work.label
            details = {"microbatch": label.microbatch, "chunk": label.chunk}
            yield TraceEvent(
                phase=label.phase,
                name=label.phase.replace("_", " "),
                start=at(span.begin),
                end=at(span.end),
                step=STEP,
                details={key: value for key, value in details.items() if value is not None},
            )

    return [
        RankTrace(
            rank=rank,
            world_size=len(programs.ranks),
            device="simulated",
            place=programs.places[rank] if programs.places else {},
            events=tuple(events(rank)),
            cut_off=False,
        )
        for rank in range(len(programs.ranks))
    ]
