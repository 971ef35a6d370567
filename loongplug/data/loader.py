"""The microbatches that a rank's chunks consume, made of what a source gives."""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loongplug.context.row_parts import RowParts
from loongplug.data.microbatch import ALL_TEXT, Media, Microbatch, TextNeeds, Unit
from loongplug.data.planned_media import PlannedMicrobatch, PlannedUnit
from loongplug.data.processor import Processor
from loongplug.data.sample import RowExtent, Sample, among
from loongplug.data.source import LocalSource

Heard = Callable[[], Collection[int]]  # which samples have bad media: the call waits for it
# What this rank encodes of an encoder's unit, None where that is nothing; and of parts of it.
Delivery = Callable[[PlannedUnit], tuple[Media | None, Sequence[Heard]]]
_ALIGNED = 8  # each rank's tokens are a multiple of it: kernels read operands by 16 bytes
_NOWHERE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """As long as the longest sample, rounded up so that ``parts`` ranks get equally much of a row.

    Of the samples of one microbatch, or, with ``by_step``, of all that a replica has in the step.
    """

    parts: int = 1
    by_step: bool = False

    def of(self, microbatches: Iterable[Sequence[RowExtent]], *, longest: int) -> int:
        """Tokens of a row of any of these microbatches; at most ``longest``, which fits a rank."""
        needed = max((each.tokens for extents in microbatches for each in extents), default=0)
        multiple = self.parts * _ALIGNED
        return min(max(1, -(-needed // multiple)) * multiple, longest)


class MicrobatchLoader(Iterator[Microbatch]):
    """Endless microbatches for each of a rank's virtual chunks; as an iterator, for the first.

    The schedule runs chunks at different times; what the others have yet to ask for is kept for
    them, at most the microbatches of one step.
    """

    def __init__(
        self,
        source: LocalSource,
        *,
        processor: Processor,
        seq_length: int,
        token_ids: Mapping[str, Sequence[int]],
        packed: bool = False,
        row_lengths: RowLengths | None = None,
        deliveries: Mapping[str, Delivery] = MappingProxyType({}),
        needs: Sequence[TextNeeds] = (ALL_TEXT,),
        pins: bool = False,
        on_made: Callable[[], None] | None = None,
        parts: RowParts | None = None,
    ) -> None:
        """``token_ids``: by encoder, those of tokens that hold the places of its features.

        ``row_lengths``: None where all rows are of ``seq_length`` tokens, as packs are. ``needs``:
        by chunk, what text it takes. ``deliveries``: by encoder, what gives media as its passes
        take them. ``parts``: which part of each row this rank holds, if not whole ones.
        """
        self.source = source
        self._processor = processor
        self._seq_length = seq_length
        self._token_ids = token_ids
        self._packed = packed
        self._row_lengths = row_lengths
        self._deliveries = deliveries
        self._needs = tuple(needs)
        self._pins = pins
        self._on_made = on_made
        self._parts = parts
        self._step: Iterator[tuple[PlannedMicrobatch, int]] = iter(())  # with lengths of rows
        self._waiting: list[deque[Microbatch]] = [deque() for _ in needs]

    def __next__(self) -> Microbatch:
        """The first chunk's next; ValueError with file and line for a row that cannot be used."""
        return self._next_of(0)

    def chunk(self, index: int) -> Iterator[Microbatch]:
        if index == 0:
            return self
        return map(self._next_of, repeat(index))

    def close(self) -> None:
        self.source.close()

    def _next_of(self, chunk: int) -> Microbatch:
        if not self._waiting[chunk]:
            self._make()
        return self._waiting[chunk].popleft()

    def _make(self) -> None:
        if (begun := next(self._step, None)) is None:
            self._step = self._next_step()
            begun = next(self._step)
        planned, seq_length = begun
        found = {name: each(planned.units[name]) for name, each in self._deliveries.items()}
        units = {
            name: Unit(
                grids=unit.media.grids,
                shares=tuple(each.share for each in unit.shares),
                media=found[name][0] if name in found else None,
            )
            for name, unit in planned.units.items()
        }
        made = collate(
            planned.samples,
            pad_token_id=self._processor.pad_token_id,
            seq_length=seq_length,
            token_ids=self._token_ids,
            packed=self._packed,
            needs=self._needs,
            units=units,
            heard=[each for _, heard in found.values() for each in heard],
            number=planned.number,
            pins=self._pins,
            parts=self._parts,
        )
        for waiting, microbatch in zip(self._waiting, made, strict=True):
            waiting.append(microbatch)
        if self._on_made is not None:
            self._on_made()

    def _next_step(self) -> Iterator[tuple[PlannedMicrobatch, int]]:
        """The step's microbatches, and how long their rows are: ranks agree by all samples."""
        step, lengths, longest = self.source.next_step(), self._row_lengths, self._seq_length
        if lengths is None:
            return zip(step, repeat(longest), strict=False)  # unlike a generator, outlives an error
        if not lengths.by_step:

            def with_length(each: PlannedMicrobatch) -> tuple[PlannedMicrobatch, int]:
                return each, lengths.of([each.extents], longest=longest)

            return map(with_length, step)
        together = list(step)  # the extents of all of them, to know the longest
        of_replica = {
            replica: lengths.of(
                (each.extents for each in together if each.replica == replica), longest=longest
            )
            for replica in {each.replica for each in together}
        }
        return iter([(each, of_replica[each.replica]) for each in together])


def collate(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    seq_length: int,
    token_ids: Mapping[str, Sequence[int]] = MappingProxyType({}),
    packed: bool = False,
    needs: Sequence[TextNeeds] = (ALL_TEXT,),
    units: Mapping[str, Unit] = MappingProxyType({}),
    heard: Sequence[Heard] = (),
    number: int = 0,
    pins: bool = False,
    parts: RowParts | None = None,
) -> tuple[Microbatch, ...]:
    """Samples into one microbatch for each chunk, of which ``needs`` says what text it consumes.

    Text is padded to ``seq_length`` on the right, with position 0 and mask 0, and made once for
    all chunks; with ``pins``, in page-locked memory. ``units`` by encoder come without places, and
    their media are for the first chunk. Each sample has a row of its own, or, where they are
    ``packed``, all follow each other in one. Tokens with one of an encoder's ``token_ids`` hold the
    places of its features. ``parts``: which part of each row's text a rank holds, if not all.
    """
    assert units.keys() <= token_ids.keys(), "an encoder's features have places"
    rows = [list(samples)] if packed else [[sample] for sample in samples]
    spans = list(_spans(rows, seq_length=seq_length))
    lengths = [length for sample in samples for length in sample.extent.lengths or (0,)]
    assert packed or len(lengths) == len(samples), "a rule asks for packing"
    segments = tuple(filter(None, lengths)) if packed else None
    own = None if parts is None else parts.of(seq_length, segments=segments)
    assert own is None or own.split.length == seq_length, (own, seq_length)

    fills: dict[str, tuple[int, type[np.generic]]] = {
        "input_ids": (pad_token_id, np.int64),
        "labels": (pad_token_id, np.int64),
        "loss_mask": (0, np.float32),
        "position_ids": (0, np.int64),
    }

    def filled(name: str, but: Container[int] = ()) -> Tensor:
        """[b, s], and of positions [3, b, s]."""
        (padding, kind), axes = fills[name], (3,) * (name == "position_ids")
        target: NDArray[np.generic] = np.full((*axes, len(rows), seq_length), padding, dtype=kind)
        for number, (row, span, sample) in enumerate(spans):
            if number not in but:
                target[..., row, span] = getattr(sample, name)
        held = torch.from_numpy(target if own is None else target.take(own.part.places, axis=-1))
        return held.pin_memory() if pins else held

    def counts() -> Tensor | None:
        bad = set[int]().union(*(each() for each in heard))
        return filled("loss_mask", but=bad) if bad else made["loss_mask"]

    asked = {
        name: [getattr(chunk, name) for chunk in needs]
        for name in ("input_ids", "labels", "loss_mask")
    }
    made = {name: filled(name) if any(chunks) else None for name, chunks in asked.items()}
    position_ids = filled("position_ids")
    first = {
        name: replace(units.get(name, Unit()), places=_places(spans, len(rows), ids))
        for name, ids in token_ids.items()
    }
    later = {name: replace(unit, media=None) for name, unit in first.items()}
    return tuple(
        Microbatch(
            **{name: made[name] if asked[name][index] else None for name in asked},
            position_ids=position_ids,
            tokens=sum(lengths),
            units=later if index else first,
            segments=segments,
            lengths=tuple(lengths),
            number=number,
            own=own,
            counts=counts if heard else None,
        )
        for index in range(len(needs))
    )


def _places(
    spans: Iterable[tuple[int, slice, Sample]], rows: int, ids: Sequence[int]
) -> tuple[NDArray[np.int64], ...]:
    """Where tokens with these ids lie in each row."""
    found: list[list[NDArray[np.int64]]] = [[_NOWHERE] for _ in range(rows)]
    for row, span, sample in spans:
        found[row].append(among(sample.input_ids, ids).nonzero()[0] + span.start)
    return tuple(map(np.concatenate, found))


def _spans(
    rows: Sequence[Sequence[Sample]], *, seq_length: int
) -> Iterator[tuple[int, slice, Sample]]:
    """Where each sample lies: its row, its tokens' places there."""
    for row, members in enumerate(rows):
        ends = list(accumulate(map(len, members)))
        assert max(ends, default=0) <= seq_length, (ends, seq_length)
        for sample, end in zip(members, ends, strict=True):
            yield row, slice(end - len(sample), end), sample
