"""What a policy is asked of a step: the one maker, from where an encoder lies. Pure."""

from collections.abc import Sequence

from loongplug.hetero.modes import Mode
from loongplug.hetero.pipeline_graph import warmup
from loongplug.hetero.placement import ApartPiece, Edge
from loongplug.hetero.policies import EncoderStep
from loongplug.hetero.stream import Stream
from loongplug.parallel.layout import Layout


def made_by(
    rank: int, *, layout: Layout | None, pieces: Sequence[ApartPiece]
) -> tuple[ApartPiece, ...]:
    """The ``pieces`` that ``rank`` encodes, or has a stage of, in their order.

    There are none where it encodes whole units, or lies not on the encoder's own ``layout``.
    """
    if layout is None or rank not in layout.ranks:
        return ()
    replica = layout.coordinates(rank).dp
    return tuple(each for each in pieces if each.edge.encoder == replica)


def needed_by(rank: int, *, pieces: Sequence[ApartPiece]) -> tuple[ApartPiece, ...]:
    """The ``pieces`` that ``rank`` decodes, in the order of their samples."""
    return tuple(each for each in pieces if rank in each.edge.decoder_ranks)


def encoder_step(
    mode: Mode,
    *,
    rank: int,
    edge: Edge | None,
    layout: Layout | None = None,
    pieces: Sequence[ApartPiece] = (),
    encoder_replicas: tuple[tuple[int, ...], ...],
    training: bool,
    trains: bool,
    trains_before: bool = False,
    last_stage: bool,
    ahead: int,
    rows: tuple[int, ...] = (),
    joined_rows: int = 0,
    stream: Stream | None = None,
) -> EncoderStep:
    """Of ``rank``, as :class:`EncoderStep` has it.

    ``edge`` is the encoder's in the rank's model replica. An encoder on ranks of its own has none:
    it has a ``layout``, and ``pieces`` of a microbatch of all decoder replicas. ``ahead`` are the
    forwards of the decoder's first chunk before its first backward.
    """
    made = max(1, len(made_by(rank, layout=layout, pieces=pieces)))
    apart = layout is not None and rank in layout.ranks
    stages = 1 if layout is None else layout.pp
    stage = layout.coordinates(rank).pp if layout is not None and apart else 0
    return EncoderStep(
        encoder_replicas=encoder_replicas,
        replicas=1 if edge is None else len(edge.replicas),
        replica=(0 if apart else None) if edge is None else edge.replica_of(rank),
        consumes=bool(needed_by(rank, pieces=pieces)) if edge is None else rank in edge.consumers,
        training=training,
        trains=trains,
        last_stage=last_stage,
        on_host=mode.on_host,
        rows=rows,
        joined_rows=joined_rows,
        pieces=made,
        warmup=warmup(
            microbatches=len(encoder_replicas) // made, ahead=ahead, stages=stages, stage=stage
        ),
        stage=stage,
        stages=stages,
        trains_before=training and trains_before,
        stream=stream,
    )
