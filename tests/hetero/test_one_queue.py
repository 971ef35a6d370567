"""Encoders on ranks of their own where a GPU's work waits in queues: who hangs.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, all of a rank's work goes through one queue: a receive that
is posted ahead holds up what follows, where another one stands before it on the same stream. Else
each communicator has a stream of a pool of 32, which two share where a rank has more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
import torch
from placed import ENCODER
from queued import Queues, Sent, finish, on_streams, with_shapes

from loongplug.data.microbatch import Share
from loongplug.hetero.encoder_place import EncoderPlace
from loongplug.hetero.operations import (
    BEGIN,
    Backward,
    Cargo,
    Encode,
    EncoderStep,
    Receive,
    Send,
)
from loongplug.hetero.piece_carrier import Carrier, Dealer
from loongplug.hetero.piece_routes import apart_crossings, stage_links
from loongplug.hetero.placement import ApartPiece, apart_pairs, count, one_apart, there_and_back
from loongplug.hetero.policies import apart
from loongplug.hetero.recorded_schedule import (
    Pipeline,
    Posted,
    StageEnd,
    Turn,
    Waited,
    calls,
    forwards_first,
)
from loongplug.hetero.row_moves import ExchangeSpec
from loongplug.hetero.wire import Wire
from loongplug.parallel.layout import Layout
from loongplug.simulate.order import order
from loongplug.simulate.programs import Programs

pytestmark = pytest.mark.quick

HOST = torch.device("cpu")
ROW = torch.zeros(1, 1)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An encoder, and what it has of the messages of a step.

    ``trains``: whether each stage's own parameters do.
    """

    number: int
    layout: Layout
    pieces: tuple[ApartPiece, ...]
    trains: Sequence[bool]


class Ranks:
    """A decoder's ranks and behind them those of encoders, and what each gives its queue."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        decoder: Layout,
        encoders: Sequence[Layout],
        microbatches: int,
        samples: int = 1,
        split: bool = False,
        overlap: bool = False,
        more: int = 0,
        without: Sequence[int] = (),
        trains: Sequence[Sequence[bool]] = (),
        **pipeline: Any,
    ) -> None:
        """A microbatch has so many ``samples``; ``split``: with sequence parallelism.

        ``pipeline``: of the decoder's :class:`Pipeline`, what is not as without virtual stages.
        ``overlap``: with their passes beside what is sent. ``without``: microbatches without rows.
        ``more``: so many more pieces are received ahead. ``trains``: of each encoder, which stages
        do; else all.
        """
        self._patch = patch
        self._decoder = decoder
        plain = {"stages": decoder.pp, "stage": 0, "chunks": 1, "group": decoder.pp}
        self._pipeline = Pipeline(**(plain | pipeline))
        self._overlap = overlap
        self._microbatches = microbatches
        self._samples, self._split = samples, split
        self._more = more
        self.ahead = self._most(behind=0) - 1
        self._placed = []
        offset = decoder.world_size
        for number, each in enumerate(encoders):
            entry = replace(ENCODER, name=f"encoder {number}")
            sizes = {"tp": each.tp, "dp": each.dp, "pp": each.pp}
            placement = one_apart(decoder, entry=entry, rank_offset=offset, **sizes)
            self._placed.append(
                Placed(
                    number=number,
                    layout=placement.entry(entry.name).layout,
                    pieces=placement.pieces(entry.name, micro_batch_size=samples),
                    trains=trains[number] if trains else (True,) * each.pp,
                )
            )
            offset += each.world_size
        self._rows = tuple(int(number not in without) for number in range(microbatches))

    def programs(self, *, less: int = 0) -> Programs:
        """Of all ranks; ``less``: with so many forwards of the encoders fewer ahead."""
        self._queues = Queues(self._patch)
        for rank in self._decoder.ranks:
            self._queues.turn_to(rank)
            self._decodes(rank)
        for encoder in self._placed:
            for rank in encoder.layout.ranks:
                self._queues.turn_to(rank)
                self._encodes(encoder, rank, less=less)
        return self._queues.programs()

    def finish(self) -> bool:
        """Whether a step ends that goes through one queue of each rank."""
        return finish(in_one_queue(self.programs()))

    def most(self) -> int:
        """The communicators of the rank that has most between encoders and the decoder."""
        pairs = [there_and_back(apart_pairs(each.pieces, cp=1)) for each in self._placed]
        return max(count(group for each in pairs for group in each).values())

    def _carrier(self, encoder: Placed, rank: int) -> Carrier:
        """Of a rank of the encoder, or of the decoder's first stage."""
        layout, decoder = encoder.layout, self._decoder
        here = rank in layout.ranks
        groups: Any = {what: f"{what.name} {encoder.number}" for what in Cargo}
        links = stage_links(layout, rank, widths=[1] * (layout.pp - 1))
        last = not any(source == rank for source, _ in links)
        tp_group: Any = tuple((layout if here else decoder).group("tp", rank))
        carrier = Carrier(
            wire=Wire(groups, most=self._in_flight(encoder, rank), device=HOST),
            deals=None if here else Dealer(tp_group),
            shares=Dealer(tp_group) if here and last else None,
            crossings=lambda *_: None,
            links=links,
        )
        for what in carrier.wire.windows:
            carrier.wire.windows[what] += 0 if what.back else self._more
        return carrier

    def _in_flight(self, encoder: Placed, rank: int) -> int:
        layout = encoder.layout
        stage = layout.coordinates(rank).pp if rank in layout.ranks else layout.pp - 1
        return self._most(behind=layout.pp - 1 - stage)

    def _most(self, *, behind: int) -> int:
        """Forwards before the first backward of a long step."""
        return forwards_first(self._pipeline, (3 + behind) * self._pipeline.group, behind=behind)[0]

    def _begin(self, carrier: Carrier, encoder: Placed, rank: int) -> None:
        samples = [range(self._samples)]
        if rank in encoder.layout.ranks:
            samples = [each.samples for each in self._made(encoder, rank)]
        row_tokens = [(rows,) * len(each) for rows in self._rows for each in samples]
        tokens = tuple(map(sum, row_tokens))
        chunks = self._decoder.tp if self._split else 1
        nothing: tuple[tuple[slice, ...], ...] = ((),) * (chunks - 1)
        units = ExchangeSpec(
            tokens=tokens,
            shares=((Share(encoder_replica=0),),) * len(tokens),
            width=1,
            dtype=ROW.dtype,
            shards=tuple(((slice(0, each),), *nothing) for each in tokens) if chunks > 1 else None,
            row_tokens=tuple(row_tokens),
        )
        states = [(rows, number // len(samples)) for number, rows in enumerate(tokens)]
        crossings = apart_crossings(encoder.pieces, units, cp=1, rank=rank)
        carrier.begin(crossings, states=states, trains=self._trains(encoder, rank))

    def _trains(self, encoder: Placed, rank: int) -> bool:
        """Whether gradients of the encoder come to a rank of it, or from one of the decoder."""
        if rank not in encoder.layout.ranks:
            return any(encoder.trains)
        return any(encoder.trains[: encoder.layout.coordinates(rank).pp + 1])

    def _made(self, encoder: Placed, rank: int) -> list[ApartPiece]:
        replica = encoder.layout.coordinates(rank).dp
        return [each for each in encoder.pieces if each.replica == replica]

    def _decodes(self, rank: int) -> None:
        """What a rank of the decoder does under Megatron's schedule."""
        queues, place = self._queues, self._decoder.coordinates(rank)
        tp_group, pipeline = self._decoder.group("tp", rank), self._decoder.group("pp", rank)
        encoders = self._placed if place.pp == 0 else []
        carriers = [self._carrier(each, rank) for each in encoders]
        for each, encoder in zip(carriers, encoders, strict=True):
            self._begin(each, encoder, rank)
        posted: dict[StageEnd, Sent] = {}
        needed: dict[int, list[torch.Tensor]] = {}
        stage = replace(self._pipeline, stage=place.pp)
        for call in calls(stage, self._microbatches, beside_sends=self._overlap):
            match call:
                case Posted(ends=ends):
                    for way in ends:
                        peer = pipeline[(place.pp + (1 if way.to_next else -1)) % len(pipeline)]
                        # States and gradients of virtual stages alike are one stream of two ranks.
                        posted[way] = (
                            queues.isend(ROW, dst=peer, group="decoder")
                            if way.sends
                            else queues.irecv(ROW, src=peer, group="decoder")
                        )
                case Waited(ends=ends):
                    for way in ends:
                        posted[way].wait()
                case Turn(forward=there, backward=back):
                    if there is not None and there.chunk == 0:
                        number = there.microbatch
                        needed[number] = [
                            each.dealt(number, [each.wire.receive(Cargo.FEATURES, number)])
                            for each in carriers
                        ]
                    queues.meet(tp_group)
                    if back is not None and back.chunk == 0:
                        number = back.microbatch
                        each_with = zip(carriers, encoders, needed.pop(number), strict=True)
                        for each, encoder, gradient in each_with:
                            if self._trains(encoder, rank):
                                (held,) = each.collected(number, (number,), gradient)
                                each.wire.send(Cargo.GRADIENTS, number, held)
        for each in carriers:
            each.wire.drain()

    def _encodes(self, encoder: Placed, rank: int, *, less: int) -> None:
        """What a rank of the encoder does by its plan."""
        tp_group = encoder.layout.group("tp", rank)
        carrier, made = self._carrier(encoder, rank), self._made(encoder, rank)
        self._begin(carrier, encoder, rank)
        came: dict[int, torch.Tensor] = {}
        for each in apart(self._step(encoder, rank, less=less)).get(BEGIN, ()):
            match each:
                case Send(what=what, piece=piece):
                    microbatch, number = divmod(piece, len(made))
                    rows = self._rows[microbatch] * len(made[number].samples)
                    carrier.wire.send(what, piece, torch.zeros(rows, 1))
                case Receive(what=what, piece=piece):
                    came[piece] = carrier.wire.receive(what, piece)
                case Encode():
                    self._queues.meet(tp_group)
                case Backward(pieces=(piece,) as pieces):
                    carrier.shared(pieces, came.pop(piece))
                    self._queues.meet(tp_group)
        carrier.wire.drain()

    def _step(self, encoder: Placed, rank: int, *, less: int) -> EncoderStep:
        count, stage = self._microbatches, encoder.layout.coordinates(rank).pp
        place = EncoderPlace(
            state=None, replica_group=None, layout=encoder.layout, pieces={True: encoder.pieces}
        )
        step = place.step(
            rank,
            training=True,
            decoder=self._pipeline,
            encoder_replicas=((0,),) * count * len(self._made(encoder, rank)),
            trains=self._trains(encoder, rank),
            trains_before=any(encoder.trains[:stage]),
            last_stage=False,
        )
        first = self._most(behind=encoder.layout.pp - 1 - stage) - less
        few = tuple(max(n + 1, min(first + n, count)) for n in range(count))
        return replace(step, forwards=few) if less else step


def in_one_queue(programs: Programs) -> Programs:
    return on_streams(programs, communicator=lambda stream: stream, one_queue=True)


ENCODERS = [*product((1, 2, 3)), *combinations_with_replacement((1, 2, 3), 2)]
# Stages of a decoder and of its encoders, virtual stages of each of the decoder's, whether their
# passes go on beside what is sent, and whether a forward runs together with a backward.
GRAPHS = [
    *(
        (decoder, encoders, 1, False, False)
        for decoder, encoders in product((1, 2, 3, 4), ENCODERS)
    ),
    *(
        (*sizes, *virtual)
        for sizes in product((2, 3, 4), ((1,), (2,), (3,), (2, 1)))
        for virtual in ((2, False, False), (2, True, False), (3, True, True))
    ),
    *((1, encoders, 1, False, True) for encoders in ENCODERS),
]


@pytest.mark.parametrize(("decoder", "encoders", "chunks", "overlap", "overlaps"), GRAPHS)
def test_no_step_hangs_and_one_less_is_too_few(
    monkeypatch: pytest.MonkeyPatch,
    decoder: int,
    encoders: tuple[int, ...],
    chunks: int,
    overlap: bool,
    overlaps: bool,
) -> None:
    """And where no receive holds up what follows, one less is the least.

    The first output behind the warm-up sets out before a gradient is waited for. With two less, the
    decoder lacks what its first backward waits for, where a step has as many microbatches.
    """
    each = range(1, 10) if chunks == 1 else range(decoder, 4 * decoder + 1, decoder)
    for microbatches in each:
        ranks = Ranks(
            monkeypatch,
            decoder=Layout(pp=decoder),
            encoders=[Layout(pp=stages) for stages in encoders],
            microbatches=microbatches,
            chunks=chunks,
            overlap=overlap,
            overlaps=overlaps,
        )
        none, one, two = (ranks.programs(less=less) for less in range(3))
        assert finish(in_one_queue(none)), microbatches
        assert finish(with_shapes(none, of=lambda stream: stream[2] == "decoder")), microbatches
        assert finish(in_one_queue(one)) == (microbatches < ranks.ahead + 2), microbatches
        assert finish(one), microbatches
        assert finish(two) == (microbatches < ranks.ahead or ranks.ahead < 2), microbatches


@pytest.mark.parametrize(
    "eyes", [(True, True, True), (False, True, True), (False, False, True), (False, False)]
)
@pytest.mark.parametrize("ears", [True, False])
def test_stages_that_do_not_train_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, eyes: tuple[bool, ...], ears: bool
) -> None:
    """Their own sends alone hold them back (``test_sends.py``)."""
    for decoder, chunks in ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2)):
        ranks = Ranks(
            monkeypatch,
            decoder=Layout(pp=decoder),
            encoders=[Layout(pp=len(eyes)), Layout()],
            microbatches=4 * decoder,
            chunks=chunks,
            trains=[eyes, (ears,)],
        )
        assert ranks.finish()
        assert finish(ranks.programs())


@pytest.mark.parametrize("encoders", [(1,), (2,), (1, 3)])
@pytest.mark.parametrize(("decoder", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 3)])
def test_larger_groups_of_virtual_stages_hold_up_no_gradient(
    monkeypatch: pytest.MonkeyPatch, decoder: int, chunks: int, encoders: tuple[int, ...]
) -> None:
    """A forward and a backward in turn would: gradients come without features being taken."""
    for group, overlaps in product((6, 9), (False, True)):
        for microbatches in (2 * group, 2 * group + decoder, 3 * group, 4 * group):
            ranks = Ranks(
                monkeypatch,
                decoder=Layout(pp=decoder),
                encoders=[Layout(pp=stages) for stages in encoders],
                microbatches=microbatches,
                chunks=chunks,
                group=group,
                overlap=True,
                overlaps=overlaps,
            )
            assert ranks.finish(), (group, overlaps, microbatches)
            assert finish(ranks.programs()), (group, overlaps, microbatches)


@pytest.mark.parametrize("chunks", [1, 2])
def test_receives_that_are_posted_earlier_hang(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    ranks = Ranks(
        monkeypatch,
        decoder=Layout(pp=2),
        encoders=[Layout(pp=2)],
        microbatches=8,
        chunks=chunks,
        more=1,
    )
    assert not ranks.finish()


@pytest.mark.parametrize("encoders", [(1,), (2,)])
def test_microbatches_without_rows_count_as_received_ahead(
    monkeypatch: pytest.MonkeyPatch, encoders: tuple[int, ...]
) -> None:
    """Else a receive of a later one would hold up the gradient of an earlier one."""
    for without in (range(1, 4), range(1, 5), range(2, 6), range(4, 9)):
        ranks = Ranks(
            monkeypatch,
            decoder=Layout(pp=2),
            encoders=[Layout(pp=stages) for stages in encoders],
            microbatches=12,
            without=[*without],
        )
        assert ranks.finish(), without


def drawn() -> Iterator[tuple[Layout, Layout, int]]:
    """A decoder, an encoder with other sizes, and the samples of a microbatch."""
    for tp, pp in product((2, 4, 8), (1, 2, 4, 8)):
        yield Layout(tp=tp, pp=pp), Layout(dp=4), 4
        yield Layout(tp=tp, pp=pp), Layout(tp=2, pp=2, dp=2), 2
    for tp in (2, 8):
        yield Layout(tp=tp, dp=4), Layout(), 1
        yield Layout(tp=tp, pp=2, dp=3), Layout(tp=2, dp=2), 2
    yield Layout(tp=8), Layout(dp=32), 32


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(("decoder", "encoder", "samples"), drawn())
def test_no_layout_hangs_on_32_streams_or_in_one_queue(
    monkeypatch: pytest.MonkeyPatch, decoder: Layout, encoder: Layout, samples: int, split: bool
) -> None:
    """Streams are handed out in turn: behind the 32nd communicator the first one again."""
    ranks = Ranks(
        monkeypatch,
        decoder=decoder,
        encoders=[encoder],
        microbatches=decoder.pp + 3,
        samples=samples,
        split=split,
    )
    assert ranks.most() <= 24
    order(on_streams(ranks.programs(), communicator=lambda stream: stream, pool=32))
    assert ranks.finish()
