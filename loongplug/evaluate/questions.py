"""Rows of a data file as questions with their right answers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongplug.data.blend import Rows, open_source
from loongplug.data.conversation import Conversation, Medium, parse_conversation
from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.media_kinds import KINDS, Context, opened
from loongplug.data.object_store import RemoteFile
from loongplug.data.processor import Processor
from loongplug.data.sample import MASKED, MediumExtent, bad_as
from loongplug.data.tokens import tokenize_prompt
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle

_TASK_KEYS = ("task", "kind")


@dataclass(frozen=True)
class Question:
    """Everything before a conversation's last answer, as tokens, and that answer."""

    input_ids: NDArray[np.int64]  # [n], images and videos expanded
    media: tuple[Medium, ...]  # in the order of their tokens
    answer: str
    text: str  # of the message that is answered
    task: str | None  # what the row says it is, for scores per task
    where: str  # path:line
    row: int  # of the data
    extents: tuple[MediumExtent, ...]  # of each medium


def read_questions(
    data: Path | RemoteFile,
    processor: Processor,
    *,
    limit: int | None,
    access: RowAccess = ANY_ROW,
    video_style: VideoStyle = TIMESTAMPS,
) -> list[Question]:
    """The file's rows in order, the first ``limit`` not left out; opens image headers only."""
    videos = VideoProcessor(processor, video_style)
    return questions_of(open_source(data, access=access), processor, videos=videos, limit=limit)


def questions_of(
    rows: Rows, processor: Processor, *, videos: VideoProcessor, limit: int | None
) -> list[Question]:
    """As :func:`read_questions`, of rows that are open."""
    questions: list[Question] = []
    for index in range(len(rows)):
        if len(questions) == limit:
            break
        with bad_as("row"):
            question = _question(rows, index, processor, videos=videos)
        questions += [] if question is None else [question]
    if not questions and limit != 0:
        raise ValueError(
            f"{rows.where(0)}: each row is left out by its loss or weight: ask others."
        )
    return questions


def _question(
    rows: Rows, index: int, processor: Processor, *, videos: VideoProcessor
) -> Question | None:
    row, where = rows.read(index), rows.where(index)
    conversation = parse_conversation(row, where=where, ignored=rows.access.ignored)
    if MASKED in conversation.remarks:
        return None
    *asked, last = conversation.messages
    if last.role != "assistant" or "tool_calls" in last.fields:
        calls = " and calls tools" * (last.role == "assistant")
        raise ValueError(
            f"{where}: the last message is the {last.role}'s{calls}: end the row with the"
            " assistant's right answer in words, which is compared with the model's."
        )
    prompt = Conversation(messages=tuple(asked), where=where)
    context = Context(processor, videos, where)
    found = [opened(medium, context) for medium in prompt.media(rows.media_root(index))]
    placeholders = [
        KINDS[extent.kind].placeholder(medium, extent.grid, context) for medium, extent in found
    ]
    task = next((row[key] for key in _TASK_KEYS if key in row), None)
    return Question(
        input_ids=tokenize_prompt(prompt, processor, placeholders=placeholders),
        media=tuple(medium for medium, _ in found),
        answer=last.text,
        text=asked[-1].text if asked else "",
        task=None if task is None else str(task),
        where=where,
        row=index,
        extents=tuple(extent for _, extent in found),
    )
