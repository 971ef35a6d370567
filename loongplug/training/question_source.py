"""The first rows of the validation data as microbatches of questions."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from loongplug.data.bad_samples import BadSamples
from loongplug.data.dataset import ChatDataset, Sample, require_length
from loongplug.data.kinds import medium_grid
from loongplug.data.processor import Processor
from loongplug.data.source import EncoderUnits, PlannedMicrobatch, planned_units
from loongplug.data.text_stream import ResumePoint
from loongplug.data.units import LoadedUnit, MediaBatch, UnitLoader
from loongplug.evaluate.questions import Question, questions_of

_GENERATION_FILE = "generation_config.json"


def questions_in(dataset: ChatDataset, *, limit: int) -> list[Question]:
    """The first ``limit`` rows, or all there are.

    Raises:
        ValueError: a row cannot be asked or is too long, with its place.
    """
    found = questions_of(dataset.rows, dataset.processor, videos=dataset.videos, limit=limit)
    for question in found:
        require_length(len(question.input_ids), where=question.where, seq_length=dataset.seq_length)
    return found


def end_tokens(processor: Processor) -> frozenset[int]:
    """What ends an answer, as an export of the run says it: the folder's own, else the tokenizer's.

    Raises:
        ValueError: the folder's file cannot be read.
    """
    file = processor.folder / _GENERATION_FILE
    try:
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        given = None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if given is None:
        return frozenset((processor.end_token_id,))
    return frozenset(given if isinstance(given, list) else (given,))


def microbatches_for(questions: int, *, each: int, multiple: int) -> int:
    """How many ask so many questions, ``each`` of them at a time on all replicas together."""
    return -(-questions // (each * multiple)) * multiple


def questions_for[T](questions: Sequence[T], *, dp_rank: int, dp_size: int) -> list[T]:
    """Those that a replica is asked."""
    return list(questions[dp_rank::dp_size])


class QuestionSource:
    """One step, the same each time it is asked for: this replica's questions, then blank rows.

    A :class:`~loongplug.data.source.StepSource`. Every question has room for an answer of
    ``room`` tokens behind it, which counts as text. Of all ``questions``, the replica has
    every ``dp_size``-th from ``dp_rank`` on. All replicas have equally many microbatches, a
    multiple of ``multiple``. No communication; nothing is kept from step to step.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        dataset: ChatDataset,
        *,
        room: int,
        micro_batch_size: int,
        multiple: int,
        dp_rank: int,
        dp_size: int,
        encoders: Mapping[str, EncoderUnits],
        bad_samples: BadSamples,
        same: Callable[..., None],
    ) -> None:
        self.microbatches = microbatches_for(
            len(questions), each=micro_batch_size * dp_size, multiple=multiple
        )
        self.questions = questions_for(questions, dp_rank=dp_rank, dp_size=dp_size)
        self._size = micro_batch_size
        self._encoders = encoders
        self._bad_samples = bad_samples
        self._load = UnitLoader(dataset.processor, videos=dataset.videos, cache_bytes=0)
        self._samples = [_asking(each, dataset, room=room) for each in self.questions]
        left = self.microbatches * micro_batch_size - len(self._samples)
        self._samples += [Sample.blank()] * left
        same(dp_rank, 0, self._samples, None)

    def next_step(self) -> Iterator[PlannedMicrobatch]:
        """See :meth:`~loongplug.data.source.StepSource.next_step`."""
        numbers = range(self.microbatches)
        samples = [
            tuple(self._samples[number * self._size : (number + 1) * self._size])
            for number in numbers
        ]
        units = planned_units(
            numbers,
            samples,
            step=self.microbatches,
            first_index=0,
            encoders=self._encoders,
            load=self._loaded,
        )
        for number in numbers:
            yield PlannedMicrobatch(
                number=number, samples=samples[number], units=units[number], begins=None
            )

    def resume_point(self) -> ResumePoint | None:
        """There are no packs."""
        return None

    def close(self) -> None:
        """Nothing works in the background."""

    def _loaded(self, media: MediaBatch) -> LoadedUnit:
        loaded = self._load(media)
        for bad in loaded.bad.values():
            self._bad_samples.meet(bad)
        return loaded


def _asking(question: Question, dataset: ChatDataset, *, room: int) -> Sample:
    """A question with so many places behind it, none of which counts for a loss."""
    processor = dataset.processor
    answer = np.full(room, processor.pad_token_id, dtype=np.int64)
    ids = np.concatenate([question.input_ids, answer])
    grids = tuple(
        medium_grid(medium, processor, videos=dataset.videos, where=question.where)
        for medium in question.media
    )
    return Sample(
        input_ids=ids,
        labels=ids,
        loss_mask=np.zeros(len(ids), dtype=np.float32),
        position_ids=dataset.positions(ids, question.media, grids),
        media=question.media,
        grids=grids,
        where=question.where,
    )
