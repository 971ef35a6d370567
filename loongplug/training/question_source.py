"""The first rows of the validation data as microbatches of questions."""

import json
from collections.abc import Sequence

import numpy as np

from loongplug.data.dataset import ChatDataset, Sample
from loongplug.data.extents import RowExtent
from loongplug.data.processor import Processor
from loongplug.data.row_plan import Evaluation
from loongplug.data.survey import require_length
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


class AskedRows(ChatDataset):
    """Rows as ``questions``, each with ``room`` tokens behind it for an answer."""

    def __init__(
        self, dataset: ChatDataset, questions: Sequence[Question], *, room: int, seq_length: int
    ) -> None:
        vars(self).update(vars(dataset))
        self.seq_length = seq_length
        self.extents = None  # those of the rows
        self._asked = {each.row: _asking(each, dataset, room=room) for each in questions}

    def __getitem__(self, index: int) -> Sample:
        """The question of the row; nothing in it counts for a loss."""
        return self._asked[index]


def asking(questions: Sequence[Question], *, each: int, multiple: int) -> Evaluation:
    """One step that asks all, ``each`` of them at a time on all replicas together.

    All replicas have equally many microbatches, a multiple of ``multiple``; the last are blank.
    """
    microbatches = -(-len(questions) // (each * multiple)) * multiple
    rows = tuple((question.row,) for question in questions)
    return Evaluation(rows=len(rows), of_rows=len(rows), batch=microbatches * each, packs=rows)


def _asking(question: Question, dataset: ChatDataset, *, room: int) -> Sample:
    """A question with so many places behind it, none of which counts for a loss."""
    processor = dataset.processor
    answer = np.full(room, processor.pad_token_id, dtype=np.int64)
    ids = np.concatenate([question.input_ids, answer])
    media = list(zip(question.media, question.extents, strict=True))
    return Sample(
        input_ids=ids,
        labels=ids,
        loss_mask=np.zeros(len(ids), dtype=np.float32),
        position_ids=dataset.positions(ids, media),
        extent=RowExtent(lengths=(len(ids),), shown=(len(media),), media=question.extents),
        where=question.where,
    )
