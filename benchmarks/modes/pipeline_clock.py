"""How long a step of a case should take: programs of its policies' plans and Megatron's schedule.

Nothing that is sent takes time, and work takes what the case says. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.operations import (
    BEGIN,
    END,
    Backward,
    Cargo,
    Encode,
    EncoderStep,
    Exchange,
    Operation,
    Receive,
    Send,
    StepPlan,
    When,
    forward,
)
from loongplug.hetero.placement import ApartPiece, Edge
from loongplug.hetero.recorded_schedule import Turn, around
from loongplug.hetero.step_programs import stage_acts
from loongplug.partition.clock import StageTime
from loongplug.simulate.clock import step_time
from loongplug.simulate.programs import Act, Build, Label, Meet, Post, Programs, Wait, Work
from modes.pipeline_work import Case, PacedEncoder, streamed_time


def predicted(case: Case) -> float:
    """Milliseconds from the first work to the last.

    Between stages, nobody goes on before what it sends is received: so are gloo's sends, and so
    waits what comes behind one on a device. A send from an encoder on ranks of its own waits not,
    and neither does any where the encoder streams.
    """
    return streamed_time(case) if case.streams else float(step_time(programs(case)))


def programs(case: Case) -> Programs:
    """Of all ranks.

    Encoders nest as the product's executors do: the first begins first, and acts last.
    """
    build = Build()
    sides = [_Side(case, each, build) for each in case.encoders]
    inner = sides[::-1]

    def acts(rank: int) -> Iterator[Act]:
        for side in sides:
            yield from side.acts(rank, BEGIN)
        if rank in case.decoder.ranks:
            yield from _passes(case, inner, rank, build=build)
        for side in inner:
            yield from side.acts(rank, END)

    return build.programs([[*acts(rank)] for rank in range(case.ranks)])


def _passes(case: Case, inner: "Sequence[_Side]", rank: int, *, build: Build) -> Iterator[Act]:
    """What Megatron's schedule does on a stage, with the encoders' work in its places."""
    ranks = case.decoder.group("pp", rank)
    stage = ranks.index(rank)
    takes = case.stages[stage]
    here = [side.in_forward(rank) for side in inner]

    def work(turn: Turn) -> Iterator[Act]:
        one = turn.forward or turn.backward
        assert one is not None
        first, forwards = one.chunk == 0, turn.forward is not None
        time = takes.forward if forwards else takes.backward
        within = sum(each.forward for each in here) if first and forwards else 0
        label = Label(turn.name, one.microbatch, one.chunk if case.chunks > 1 else None)
        for event in around(turn):
            if isinstance(event, Turn):
                yield Work(time / case.chunks + within, label)
            else:
                for side in inner:
                    yield from side.acts(rank, event)
        if first and not forwards:
            yield Work(sum(each.backward for each in here), Label("encoder_backward"))

    yield from stage_acts(
        build,
        replace(case.first_stage, stage=stage),
        case.microbatches,
        ranks=ranks,
        work=work,
        beside_sends=case.chunks > 1,
    )


@dataclass
class _Side:
    """An encoder's side of a step: the product's plans of it, by rank, as acts."""

    case: Case
    encoder: PacedEncoder
    build: Build
    _plans: dict[int, StepPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, encoder = self.case, self.encoder
        self._mode = case.mode_of(encoder)
        self._tp = case.encoder_tp(encoder)
        self._placement = self._mode.place(case.decoder, entry=encoder.entry, tp=self._tp)
        self._layout = self._placement.entry(encoder.name).layout
        self._time = case.encoder_time(encoder)
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
        time, share = self.encoder.time, bool(operations) / self._tp
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
        return self._place(edge).step(
            rank,
            training=True,
            decoder=self.case.first_stage,
            encoder_replicas=tuple((number % replicas,) for number in range(count)),
            trains=self._trains,
            trains_before=self._trains and self._stage(rank) > 0,
            on_host=self._mode.on_host,
            last_stage=False,  # it says when state leaves for the host, which none does here
        )

    def _stage(self, rank: int) -> int:
        """Of the encoder, where it has ranks of its own; 0 on others."""
        own = self._mode.apart and rank in self._layout.ranks
        return self._layout.coordinates(rank).pp if own else 0

    def _edge(self, rank: int) -> Edge | None:
        """Where it lies with the decoder."""
        return None if self._mode.apart else self._placement.edge(self.encoder.name, rank=rank)

    def _made(self, rank: int) -> tuple[ApartPiece, ...]:
        return self._place(None).made_by(rank, training=True)

    def _place(self, edge: Edge | None) -> EncoderPlace:
        return EncoderPlace(
            state=None,
            replica_group=None,
            edge=edge,
            layout=self._layout if self._mode.apart else None,
            pieces={True: self._pieces},
        )

    def _acts(self, rank: int, operation: Operation) -> Iterator[Act]:
        match operation:
            case Encode(pieces=pieces):
                yield from self._works(rank, pieces, self._time.forward, "encoder_forward")
            case Backward(pieces=pieces):
                yield from self._works(rank, pieces, self._time.backward, "encoder_backward")
            case Exchange():
                edge = self._edge(rank)
                assert edge is not None, "the encoder lies with the decoder"
                yield Meet(self.build.group(edge.ranks))
            case Send(what=Cargo.STATES | Cargo.STATE_GRADIENTS as what, piece=piece):
                yield Post(((self._between_stages(rank, what, piece, sends=True), True),))
            case Receive(what=Cargo.STATES | Cargo.STATE_GRADIENTS as what, piece=piece):
                yield Wait(((self._between_stages(rank, what, piece, sends=False), False),))
            case Send(what=what, piece=piece):
                yield from self._send(rank, what, piece)
            case Receive(what=what, piece=piece):
                ends = self._over_edges(rank, what, piece).values()
                yield Wait(tuple((message, False) for message in ends))

    def _works(self, rank: int, pieces: Sequence[int], time: float, phase: str) -> Iterator[Act]:
        """Passes of these pieces, one by one."""
        for piece in pieces:
            yield Work(self._share(rank, piece) * time, Label(phase, piece))

    def _between_stages(self, rank: int, what: Cargo, piece: int, *, sends: bool) -> int:
        """The message; nobody waits for a send there."""
        forwards = what is Cargo.STATES
        other = self._stage(rank) + (1 if forwards == sends else -1)
        ends = [rank, self._layout.group("pp", rank)[other]]
        source, target = ends if sends else reversed(ends)
        return self.build.message((self.encoder.name, what.value, source, target), piece)

    def _share(self, rank: int, unit: int) -> float:
        """Of a microbatch's media, by this rank, in its unit."""
        made = self._made(rank)
        samples = len(made[unit % len(made)].samples) if made else self.case.samples
        return samples / self.case.samples / self._tp

    def _over_edges(self, rank: int, what: Cargo, unit: int) -> dict[int, int]:
        """The messages of what a rank makes or needs, by piece of a slot."""
        made = self._made(rank)
        if made:
            number, place = divmod(unit, len(made))
            pieces = [self._pieces.index(made[place])]
        else:
            number, pieces = unit, [*range(len(self._pieces))]
        stream = (self.encoder.name, what.value)
        return {each: self.build.message(stream, (number, each)) for each in pieces}

    def _send(self, rank: int, what: Cargo, unit: int) -> Iterator[Act]:
        """One rank stands for all that have the same."""
        for each, message in self._over_edges(rank, what, unit).items():
            piece = self._pieces[each]
            if rank in (piece.ranks[0], piece.edge.consumers[0]):
                yield Post(((message, True),))
