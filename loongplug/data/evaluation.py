"""What every evaluation goes through: the rows of the validation data in their order, each once."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.packing import Pack, packs_once
from loongplug.data.workers import Background, WorkerSettings

_CHUNK = 16  # rows that are measured at a time


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The places of an evaluation, all ranks' together: a row each or, with ``packs``, a pack.

    Places behind the last row are blank. All follows from the rows' number or lengths alone, so
    that ranks need not ask each other when an evaluation ends.
    """

    rows: int  # that are evaluated
    of_rows: int  # that there are
    batch: int  # places of a step
    packs: tuple[Pack, ...] | None

    @classmethod
    def plan(
        cls,
        dataset: ChatDataset,
        *,
        batch: int,
        most_steps: int | None,
        look_ahead: int | None,
        lengths: NDArray[np.int32] | None,
    ) -> Self:
        """Of all rows, or of the first, as many as ``most_steps`` have places for.

        With ``look_ahead``, rows are packed by their ``lengths``, for which they are read if none
        are given.
        """
        rows = len(dataset)
        places = rows if most_steps is None else min(rows, most_steps * batch)
        if look_ahead is None:
            return cls(rows=places, of_rows=rows, batch=batch, packs=None)
        tokens = _measured(dataset) if lengths is None else iter(lengths.tolist())
        found = packs_once(tokens, seq_length=dataset.seq_length, look_ahead=look_ahead)
        packs = tuple(islice(found, places))
        return cls(rows=sum(map(len, packs)), of_rows=rows, batch=batch, packs=packs)

    @property
    def steps(self) -> int:
        """How many there are, the last of which may be short."""
        places = self.rows if self.packs is None else len(self.packs)
        return -(-places // self.batch)

    def rows_at(self, places: range) -> list[int]:
        """The rows of these places; none of blank ones."""
        if self.packs is None:
            return [place for place in places if place < self.rows]
        return [row for pack in self.packs[places.start : places.stop] for row in pack]

    def __str__(self) -> str:
        packed = "" if self.packs is None else f" in {len(self.packs)} packs"
        return (
            f"{self.rows} of {self.of_rows} rows{packed}, each once, in {self.steps} steps of "
            f"{self.batch}"
        )


def evaluated_texts(
    dataset: ChatDataset,
    evaluation: Evaluation,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    workers: WorkerSettings,
) -> Background[list[int], list[Sample]]:
    """The samples of one microbatch after the other, of one evaluation after the other."""

    def made(rows: list[int]) -> list[Sample]:
        samples = dataset.text_parts(rows)
        if evaluation.packs is not None and sum(map(len, samples)) > dataset.seq_length:
            raise ValueError(
                f"{max(samples, key=len).where}: the sample's pack is longer than --seq-length"
                f" {dataset.seq_length}: rows or media have changed since they were measured. Start"
                " again; an index has to be made again before, with `loongplug data index`."
            )
        return samples + [Sample.blank()] * (micro_batch_size - len(samples))

    # As of training: neighbours are made at one time, by all ranks together.
    first, each = dp_rank * micro_batch_size, dp_size * micro_batch_size
    starts = cycle(range(first, evaluation.steps * evaluation.batch, each))
    own = (evaluation.rows_at(range(start, start + micro_batch_size)) for start in starts)
    return Background(made, own, settings=workers)


def _measured(dataset: ChatDataset) -> Iterator[int]:
    """Tokens of each row's sample; 0 of one that cannot be used."""
    rows = range(len(dataset))
    for start in rows[::_CHUNK]:
        yield from map(len, dataset.text_parts(rows[start : start + _CHUNK]))
