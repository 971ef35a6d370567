"""Who encodes which samples, where encoder and decoder have other numbers of replicas. Pure.

Slot k of a step is microbatch k of all decoder replicas together, in the order of the replicas.
Encoder replicas divide its samples among themselves, each a run of neighbours, as even as whole
samples allow. Samples are not split, so an encoder replica may have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Samples of a slot that one encoder replica makes for one decoder replica.

    ``encoder`` and ``decoder`` number the replicas, by their data parallel ranks. ``samples`` are
    places within the decoder replica's microbatch, from 0 on, and never empty.
    """

    encoder: int
    decoder: int
    samples: range


def overlaps(*, encoders: int, decoders: int, micro_batch_size: int) -> tuple[Overlap, ...]:
    """All of a slot, ordered by sample: every sample is in one of them.

    Of B = ``decoders`` x ``micro_batch_size`` samples, encoder replica j has those from
    floor(j B / ``encoders``) up to floor((j + 1) B / ``encoders``).
    """
    assert min(encoders, decoders, micro_batch_size) > 0, (encoders, decoders, micro_batch_size)
    samples = decoders * micro_batch_size
    found = []
    for encoder in range(encoders):
        first = encoder * samples // encoders
        behind = (encoder + 1) * samples // encoders
        while first < behind:
            decoder, place = divmod(first, micro_batch_size)
            count = min(behind - first, micro_batch_size - place)
            made = range(place, place + count)
            found.append(Overlap(encoder=encoder, decoder=decoder, samples=made))
            first += count
    return tuple(found)


def made_by(encoder: int, slot: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """Those of one encoder replica: one behind the other, they are all that it encodes."""
    return tuple(each for each in slot if each.encoder == encoder)
