"""What surveys of rows tell: for tests."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loongplug.data.blend import Rows
from loongplug.data.conversation import Medium
from loongplug.data.dataset import ChatDataset, Survey, Surveyor
from loongplug.data.extent_index import ExtentTable, IndexedExtents
from loongplug.data.processor import Processor
from loongplug.data.sample import Grid, Sample
from loongplug.data.survey_settings import SurveySettings
from loongplug.data.video import VideoProcessor, video_style_of


def survey_of(processor: Processor, rows: Rows, index: int, **options: Any) -> Survey:
    """Of a row as ``loongplug data check`` reads it; ``options`` are the surveyor's."""
    videos = VideoProcessor(processor, video_style_of(processor.folder))
    defaults: dict[str, Any] = {"videos": videos, "phase": "sft", "seq_length": inf}
    return Surveyor(processor, **defaults | options)(rows, index, decodes=True)


def media_in(dataset: ChatDataset, index: int) -> tuple[Medium, ...]:
    """The media of a sample, in the order of their tokens."""
    found = dataset.surveyor(dataset.rows, index)
    return tuple(found.media[number] for number in found.extent.numbers)


def grids_of(sample: Sample) -> tuple[Grid, ...]:
    """Of a sample's media, in the order of their tokens."""
    return tuple(sample.extent.media[number].grid for number in sample.extent.numbers)


def settings_of(folder: Path, **others: Any) -> SurveySettings:
    """For supervised training by a model's folder."""
    defaults = {"folder": folder, "training_phase": "sft", "timestamps": True}
    return SurveySettings(**defaults | others)


def indexed(dataset: ChatDataset, **wrong: Any) -> ChatDataset:
    """The same data with an index; ``wrong`` is what it says of its sixth row instead."""
    found = [dataset.surveyor(dataset.rows, row) for row in range(len(dataset))]
    extents = [(each.extent, each.remarks) for each in found]
    if wrong:
        extents[5] = replace(extents[5][0], **wrong), ()
    made = copy(dataset)
    made.extents = IndexedExtents(dataset.rows, (ExtentTable.of(extents),))
    return made


def dataset_of_media(
    media: Sequence[Medium], processor: Processor, *, videos: VideoProcessor, where: str
) -> Any:
    """As far as a loader of units looks at one, whose only row has these media."""
    return SimpleNamespace(
        processor=processor,
        videos=videos,
        rows=SimpleNamespace(where=lambda row: where),
        media=lambda row, known: dict(enumerate(media)),
    )
