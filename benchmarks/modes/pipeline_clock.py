"""How long a step of a case should take: its policies' plans and 1F1B, over a clock. Pure.

Each rank's step is a list of acts, as the product and Megatron do them: work, and meetings with
other ranks. Nothing that is sent takes time, and work takes what the case says.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loongplug.hetero.encoder_steps import encoder_step, made_by
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Encode,
    EncodeInForward,
    EncoderBackward,
    GatherFeatures,
    Operation,
    ScatterGradients,
    StepPlan,
    When,
    backward,
    forward,
    gradient,
)
from loongplug.hetero.pipeline_graph import ahead
from loongplug.hetero.placement import ApartPiece, Edge
from loongplug.hetero.policies import EncoderStep
from loongplug.partition.clock import StageTime
from modes.pipeline_work import Case, PacedEncoder, streamed_time


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A rank says that it has come so far, by ``posts``, and goes on when all ``needs`` are said.

    A receive needs its send; between stages a send needs its receive, too, and in a collective
    every rank needs every other.
    """

    posts: tuple[Hashable, ...] = ()
    needs: tuple[Hashable, ...] = ()


Act = float | Meeting  # milliseconds of work, or a meeting


def predicted(case: Case) -> float | None:
    """Milliseconds from the first act to the last; None with virtual stages, which it knows not.

    Between stages, nobody goes on before what it sends is received: so are gloo's sends, and so
    waits what comes behind one on a device. A send from an encoder on ranks of its own waits not,
    and neither does any where the encoder streams, which knows virtual stages, too.
    """
    if case.streams:
        return streamed_time(case)
    if case.chunks > 1:
        return None
    sides = [_Side(case, each) for each in case.encoders]
    return finish({rank: list(_program(case, sides, rank)) for rank in range(case.ranks)})


def finish(programs: Mapping[int, Sequence[Act]]) -> float:
    """When the last rank is through, in the unit of the work."""
    said: dict[Hashable, float] = {}
    clock = dict.fromkeys(programs, 0.0)
    left = {rank: deque(program) for rank, program in programs.items()}
    moved = True
    while moved:
        moved = False
        for rank, acts in left.items():
            while acts and _done(acts[0], rank, clock, said):
                acts.popleft()
                moved = True
    assert not any(left.values()), "ranks wait for one another"
    return max(clock.values())


def _done(act: Act, rank: int, clock: dict[int, float], said: dict[Hashable, float]) -> bool:
    if not isinstance(act, Meeting):
        clock[rank] += act
        return True
    for each in act.posts:
        said.setdefault(each, clock[rank])
    if not all(each in said for each in act.needs):
        return False
    clock[rank] = max([clock[rank], *(said[each] for each in act.needs)])
    return True


def _program(case: Case, sides: "Sequence[_Side]", rank: int) -> Iterator[Act]:
    """Encoders nest as the product's executors do: the first begins first, and acts last."""
    inner = sides[::-1]
    for side in sides:
        yield from side.acts(rank, BEGIN)
    if rank in case.decoder.ranks:
        yield from _passes(case, inner, rank)
    for side in inner:
        yield from side.acts(rank, END)


def _passes(case: Case, inner: "Sequence[_Side]", rank: int) -> Iterator[Act]:
    """What Megatron's 1F1B does on a stage, in its order, and what it waits for together."""
    stages = case.decoder.group("pp", rank)
    place, count = stages.index(rank), case.microbatches
    takes = case.stages[place]
    here = [side.in_forward(rank) for side in inner]

    def transfer(other: int, name: str, number: int, *, sends: bool) -> Meeting:
        if not 0 <= other < len(stages):
            return Meeting()
        ends = (rank, stages[other]) if sends else (stages[other], rank)
        mine, theirs = ("sent", "received") if sends else ("received", "sent")
        return Meeting(posts=((mine, name, number, *ends),), needs=((theirs, name, number, *ends),))

    def work_forward(number: int) -> Iterator[Act]:
        for side in inner:
            yield from side.acts(rank, forward(number))
        yield takes.forward + sum(each.forward for each in here)

    def work_backward(number: int) -> Iterator[Act]:
        for side in inner:
            yield from side.acts(rank, backward(number))
        yield takes.backward
        for side in inner:
            yield from side.acts(rank, gradient(number))
        yield sum(each.backward for each in here)

    warm = min(len(stages) - 1 - place, count)
    for number in range(warm):
        yield transfer(place - 1, "F", number, sends=False)
        yield from work_forward(number)
        yield transfer(place + 1, "F", number, sends=True)
    if warm < count:
        yield transfer(place - 1, "F", warm, sends=False)
    for number in range(warm, count):
        behind = number - warm
        yield from work_forward(number)
        yield _together(
            transfer(place + 1, "F", number, sends=True),
            transfer(place + 1, "B", behind, sends=False),
        )
        yield from work_backward(behind)
        given = transfer(place - 1, "B", behind, sends=True)
        if number + 1 < count:
            given = _together(given, transfer(place - 1, "F", number + 1, sends=False))
        yield given
    for number in range(count - warm, count):
        yield transfer(place + 1, "B", number, sends=False)
        yield from work_backward(number)
        yield transfer(place - 1, "B", number, sends=True)


def _together(first: Meeting, second: Meeting) -> Meeting:
    return Meeting(posts=first.posts + second.posts, needs=first.needs + second.needs)


@dataclass
class _Side:
    """An encoder's side of a step: the product's plans of it, by rank, as acts."""

    case: Case
    encoder: PacedEncoder
    _plans: dict[int, StepPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, encoder = self.case, self.encoder
        self._mode = case.mode_of(encoder)
        self._tp = case.encoder_tp(encoder)
        self._placement = self._mode.place(case.decoder, entry=encoder.entry, tp=self._tp)
        self._layout = self._placement.entry(encoder.name).layout
        self._trains = encoder.time.backward > 0
        self._pieces: tuple[ApartPiece, ...] = ()
        if self._mode.apart:
            self._pieces = self._placement.pieces(encoder.name, micro_batch_size=case.samples)

    def acts(self, rank: int, when: When) -> Iterator[Act]:
        """What the rank does for this encoder then."""
        if not self._mode.around_schedule:
            return
        for operation in self._plan(rank).get(when, ()):
            yield from self._acts(rank, operation)

    def in_forward(self, rank: int) -> StageTime:
        """What the decoder's forward does for it, and the backward."""
        if self._mode.around_schedule:
            return StageTime(forward=0, backward=0)
        operations = self._plan(rank).get(forward(0), ())
        inside = any(isinstance(each, EncodeInForward) for each in operations)
        time, share = self.encoder.time, inside / self._tp
        return StageTime(forward=time.forward * share, backward=time.backward * share)

    def _plan(self, rank: int) -> StepPlan:
        """As the engine has the policy make it."""
        if rank not in self._plans:
            self._plans[rank] = self._mode.policy(self._step(rank))
        return self._plans[rank]

    def _step(self, rank: int) -> EncoderStep:
        edge = self._edge(rank)
        replicas = 1 if edge is None else len(edge.replicas)
        count = self.case.microbatches * max(1, len(self._made(rank)))
        return encoder_step(
            self._mode,
            rank=rank,
            edge=edge,
            layout=self._layout if self._mode.apart else None,
            pieces=self._pieces,
            encoder_replicas=tuple((number % replicas,) for number in range(count)),
            training=True,
            trains=self._trains,
            last_stage=False,  # it says when state leaves for the host, which none does here
            ahead=ahead(pipeline=len(self.case.stages), virtual=self.case.chunks > 1),
        )

    def _edge(self, rank: int) -> Edge | None:
        """Where it lies with the decoder."""
        return None if self._mode.apart else self._placement.edge(self.encoder.name, rank=rank)

    def _made(self, rank: int) -> tuple[ApartPiece, ...]:
        return made_by(rank, layout=self._layout, pieces=self._pieces)

    def _acts(self, rank: int, operation: Operation) -> Iterator[Act]:
        match operation:
            case Encode(unit=int(unit)):
                yield self._share(rank, unit) * self.encoder.time.forward
            case EncoderBackward(unit=int(unit)):
                yield self._share(rank, unit) * self.encoder.time.backward
            case GatherFeatures(units=units):
                yield self._exchange(rank, units, name="features")
            case ScatterGradients(units=units):
                yield self._exchange(rank, units, name="gradients")

    def _share(self, rank: int, unit: int) -> float:
        """Of a microbatch's media, by this rank, in its unit."""
        made = self._made(rank)
        samples = len(made[unit % len(made)].samples) if made else self.case.samples
        return samples / self.case.samples / self._tp

    def _exchange(self, rank: int, units: range, *, name: str) -> Meeting:
        edge, encoder = self._edge(rank), self.encoder.name
        if edge is not None:
            keys = {each: (encoder, name, units, each) for each in edge.ranks}
            return Meeting(posts=(keys[rank],), needs=tuple(keys.values()))
        (unit,) = units
        made = self._made(rank)
        gives = bool(made) == (name == "features")
        if made:
            number, place = divmod(unit, len(made))
            keys_of = [(encoder, name, number, self._pieces.index(made[place]))]
        else:
            keys_of = [(encoder, name, unit, place) for place in range(len(self._pieces))]
        return Meeting(posts=tuple(keys_of)) if gives else Meeting(needs=tuple(keys_of))
