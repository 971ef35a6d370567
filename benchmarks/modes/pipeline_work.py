"""What ``bench.py pipeline`` runs: times of stages and encoders, in a mode. Pure."""

from argparse import Namespace
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import isfinite, lcm, prod
from typing import Any, Final

from loongplug.data.microbatch import Share
from loongplug.data.planned_media import Assignment
from loongplug.data.sample import Grid
from loongplug.hetero.bubble_drafts import streamed
from loongplug.hetero.bubble_planner import StepPlanner, StreamedCosts, Units
from loongplug.hetero.modes import APART, NAMED, STREAMED, Mode, mode_of
from loongplug.hetero.recorded_schedule import Pipeline
from loongplug.hetero.step_programs import PassCosts, PieceCost, plan_time
from loongplug.models.entries import Entry, Role
from loongplug.parallel.layout import Layout
from loongplug.parallel.states import TEXT_DECODER
from loongplug.partition.clock import StageTime

# All modes in a word, also those that no YAML names.
IN_A_WORD: Final = {**NAMED, "own_ranks": APART, "streamed": STREAMED}
# The modes that every case can have; those that fill bubbles want some.
MODES: Final = tuple(name for name, mode in IN_A_WORD.items() if not mode.fills_bubbles)
_PIECES: Final = 4  # that a microbatch's media are cut into there
TOKENS: Final = 4  # of a sample; all of them stand for media, of which there may be four
_TICKS: Final = 1_000_000  # of a stage's or encoder's longest time; plans want integers


@dataclass(frozen=True, kw_only=True)
class PacedEncoder:
    """An encoder that sleeps: ``time`` is what one rank takes for a microbatch's media, in ms.

    ``tp`` ranks share that evenly; None for as many as the mode has where a YAML says nothing.
    ``replicas`` and ``stages`` count where it has ranks of its own: each replica takes its share of
    every microbatch, and each stage an equal part of that.
    """

    name: str
    time: StageTime
    tp: int | None = None
    replicas: int = 1
    stages: int = 1

    @property
    def entry(self) -> Entry:
        """As the product's modules know it."""
        return Entry(name=self.name, role=Role.ENCODER, media=("image",), into=TEXT_DECODER)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: its mode in a word, and times in ms of a microbatch.

    ``stages`` are the decoder's, by stage, of each of the ``tp`` ranks of one; with ``chunks``
    virtual stages, a rank's time is divided among its own evenly.

    Raises:
        ValueError: the mode is unknown, or a number is too small for it.
    """

    mode: str
    stages: tuple[StageTime, ...]
    encoders: tuple[PacedEncoder, ...] = ()
    microbatches: int
    tp: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.mode not in IN_A_WORD:
            raise ValueError(f"--mode {self.mode}: expected one of {', '.join(IN_A_WORD)}.")
        numbers = {
            "--microbatches": self.microbatches,
            "--tp": self.tp,
            "--virtual-stages": self.chunks,
            "--pp": len(self.stages),
        }
        for flag, number in numbers.items():
            if number < 1:
                raise ValueError(f"{flag} is {number}: expected at least 1.")
        if self.chunks > 1 and (len(self.stages) == 1 or self.microbatches % len(self.stages)):
            raise ValueError(
                f"--virtual-stages {self.chunks} at --pp {len(self.stages)} and --microbatches "
                f"{self.microbatches}: expected two stages or more, and a multiple of their number."
            )
        if self.streams and not (len(self.encoders) == 1 and len(self.stages) > 1):
            raise ValueError(
                f"--mode {self.mode} with {len(self.encoders)} encoders and --pp "
                f"{len(self.stages)}: expected one encoder, and two stages or more."
            )

    @property
    def streams(self) -> bool:
        """Whether the encoder works between the passes of the decoder."""
        return IN_A_WORD[self.mode].fills_bubbles

    @property
    def tick(self) -> float:
        """Milliseconds that a plan counts as one: all times in one proportion give one plan."""
        times = [*self.stages, *(each.time for each in self.encoders)]
        return max(max(each.forward, each.backward) for each in times) / _TICKS or 1.0

    @property
    def pieces(self) -> int:
        """Of a microbatch's media."""
        return _PIECES if self.streams else 1

    @property
    def decoder(self) -> Layout:
        """On the first ranks."""
        return Layout(tp=self.tp, pp=len(self.stages))

    @property
    def first_stage(self) -> Pipeline:
        """The decoder's."""
        stages = len(self.stages)
        return Pipeline(stages=stages, stage=0, chunks=self.chunks, group=stages)

    @property
    def apart(self) -> bool:
        """Whether encoders have ranks of their own, behind the decoder's and one another's."""
        return IN_A_WORD[self.mode].apart

    @property
    def ranks(self) -> int:
        """Processes, most of which sleep at any time."""
        own = sum(self.encoder_tp(each) * each.replicas * each.stages for each in self.encoders)
        return self.decoder.world_size + (own if self.apart else 0)

    @property
    def samples(self) -> int:
        """Of a microbatch: as few as give each encoder replica on ranks of its own one."""
        return lcm(*(each.replicas for each in self.encoders)) if self.apart else 1

    @property
    def site(self) -> Hashable:
        """Cases of one site can be run in the same process groups, one behind the other."""
        if self.streams:
            return self  # its plans are made of its times
        encoders = [
            (e.name, e.tp, e.replicas, e.stages, e.time.backward > 0) for e in self.encoders
        ]
        return self.mode, self.tp, len(self.stages), self.chunks, tuple(encoders)

    def mode_of(self, encoder: PacedEncoder) -> Mode:
        """The product's, for one of the case's encoders."""
        if not self.apart:
            return IN_A_WORD[self.mode]
        before = self.encoders[: self.encoders.index(encoder)]
        own = sum((each.tp or 1) * each.replicas * each.stages for each in before)
        yaml: Any = Namespace(
            rank_offset=self.decoder.world_size + own,
            data_parallel_size=encoder.replicas,
            pipeline_model_parallel_size=encoder.stages,
        )
        return mode_of(Namespace(), yaml)

    def encoder_time(self, encoder: PacedEncoder) -> StageTime:
        """Of a microbatch's media on one rank, which has one stage of it or all."""
        stages = encoder.stages if self.apart else 1
        return StageTime(
            forward=encoder.time.forward / stages, backward=encoder.time.backward / stages
        )

    def encoder_tp(self, encoder: PacedEncoder) -> int:
        """How many ranks share a unit of it."""
        return encoder.tp or self.mode_of(encoder).encoder_tp or self.tp


def grids_of(case: Case, *, samples: int) -> tuple[Grid, ...]:
    """What so many samples have for an encoder: as many media as a microbatch has pieces."""
    return ((1, 1, samples * TOKENS // case.pieces),) * case.pieces


def media_of(case: Case) -> dict[str, list[tuple[Grid, ...]]]:
    """Of a step, by encoder and microbatch."""
    grids = grids_of(case, samples=case.samples)
    return {each.name: [grids] * case.microbatches for each in case.encoders}


def paced_costs(case: Case, encoder: PacedEncoder) -> StreamedCosts:
    """What the product's planner is told of an encoder that streams; costs are ticks."""
    chunks, parts = case.chunks, case.pieces * case.encoder_tp(encoder)
    forward, backward = (
        round(each / parts / case.tick) for each in (encoder.time.forward, encoder.time.backward)
    )
    return StreamedCosts(
        of_media=lambda grids: PieceCost(forward * len(grids), backward * len(grids)),
        tokens=prod,
        forward=tuple(round(x.forward / chunks / case.tick) for x in case.stages) * chunks,
        backward=tuple(round(x.backward / chunks / case.tick) for x in case.stages) * chunks,
        group=len(case.stages),
        of_passes=PassCosts(trains=backward > 0, joined=forward * case.pieces * case.microbatches),
        assigned=in_turn,
        joined_rows=None,
    )


def in_turn(units: Units, replicas: int) -> Sequence[tuple[Share, ...]]:
    """Which of an encoder's replicas encodes each unit of a step: each in turn."""
    return Assignment(replicas=replicas).of_step(units)


def streamed_time(case: Case) -> float:
    """Milliseconds of a step of a case that streams, by the clock of its plan."""
    layout, (encoder,) = case.decoder, case.encoders
    entry, mode = encoder.entry, case.mode_of(encoder)
    placement = mode.place(layout, entry=entry, tp=case.encoder_tp(encoder))
    replicas = placement.edge(entry.name, rank=0).replicas
    planner = StepPlanner(
        paced_costs(case, encoder), stages=[layout.coordinates(each[0]).pp for each in replicas]
    )
    media = media_of(case)[encoder.name]
    step, otherwise = planner.step(media), planner.separated_time(media)
    plan = streamed(step, otherwise=otherwise)
    found = otherwise if plan is None else plan_time(step, plan)
    assert found is not None, "ranks wait for one another"
    return found * case.tick


def parse_stages(text: str, *, pp: int) -> tuple[StageTime, ...]:
    """From "10/20" for all stages, or "10/20,5/10" with one for each.

    Raises:
        ValueError: that is not what ``text`` is.
    """
    found = [_parse_time(each, flag="--decoder") for each in text.split(",")]
    if len(found) not in (1, pp):
        raise ValueError(
            f"--decoder {text} has the times of {len(found)} stages: expected one for all, or one "
            f"for each of the {pp}."
        )
    return tuple(found * pp if len(found) == 1 else found)


def parse_encoder(text: str) -> PacedEncoder:
    """From "NAME=10/20", or "NAME=10/20x2p3": two replicas of three stages on ranks of their own.

    Raises:
        ValueError: that is not what ``text`` is.
    """
    name, equals, rest = text.partition("=")
    rest, _, stages = rest.partition("p")
    times, _, replicas = rest.partition("x")
    counts = [each or "1" for each in (replicas, stages)]
    if (
        not name.isidentifier()
        or not equals
        or not all(map(str.isdecimal, counts))
        or "0" in counts
    ):
        raise ValueError(
            f"--encoder {text}: expected NAME=FORWARD/BACKWARD, or with xREPLICAS or pSTAGES."
        )
    time = _parse_time(times, flag="--encoder")
    return PacedEncoder(name=name, time=time, replicas=int(counts[0]), stages=int(counts[1]))


def _parse_time(text: str, *, flag: str) -> StageTime:
    parts: Sequence[str] = text.split("/")
    try:
        forward, backward = map(float, parts)
    except ValueError:
        forward = backward = -1.0
    if not (0 <= forward < 60_000 and 0 <= backward < 60_000 and isfinite(forward + backward)):
        raise ValueError(
            f"{flag} {text}: expected the milliseconds of a forward and of a backward, as 10/20."
        )
    return StageTime(forward=forward, backward=backward)
