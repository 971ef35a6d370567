"""The demo's processor and a little JSONL writer, for the tests of the data folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from digits.tasks import WORDS
from made_media import picture
from made_media import write_video as write_video_file
from surveyed import settings_of
from video_reference import Family, make_family

from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.survey_settings import SurveySettings
from loongplug.verify.tiny_processor import write_processor


@pytest.fixture(scope="session")
def processor_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder, words=WORDS)
    return folder


@pytest.fixture(scope="session")
def processor(processor_folder) -> Processor:
    return load_processor(processor_folder)


@pytest.fixture
def settings(processor_folder) -> SurveySettings:
    """What an index of rows for the demo's processor is made by."""
    return settings_of(processor_folder)


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., Path]:
    """Writes rows (dictionaries, or raw lines) to a JSONL file and gives its path."""

    def write(*rows: dict[str, Any] | str) -> Path:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def write_image(tmp_path) -> Callable[..., str]:
    """Writes a picture of noise into the rows' folder and gives its relative name."""

    def write(name: str, *, height: int, width: int, seed: int = 0) -> str:
        picture(height, width, seed).save(tmp_path / name)
        return name

    return write


@pytest.fixture
def write_video(tmp_path) -> Callable[..., str]:
    """Writes a video file into the rows' folder and gives its relative name."""
    pytest.importorskip("av", reason="video files need PyAV: pip install 'loongplug[video]'")

    def write(name: str, frames: int, **options: Any) -> str:
        write_video_file(tmp_path / name, frames, **options)
        return name

    return write


@pytest.fixture
def write_frames(write_image) -> Callable[..., list[str]]:
    """Writes the frames of a video, all different, and gives their relative names."""

    def write(name: str, count: int, *, height: int, width: int) -> list[str]:
        return [
            write_image(f"{name}{i}.png", height=height, width=width, seed=100 * count + i)
            for i in range(count)
        ]

    return write


@pytest.fixture(scope="session")
def block_processor(tmp_path_factory) -> Processor:
    """The demo's processor as a family without timestamps takes it."""
    folder = tmp_path_factory.mktemp("block_processor")
    write_processor(folder, "qwen2_5_vl", words=WORDS)
    return load_processor(folder)


@pytest.fixture(scope="session", params=["timestamps", "blocks"])
def family(request, processor, block_processor) -> Family:
    """Each of the two families that know videos, with what transformers has for it."""
    timestamps = request.param == "timestamps"
    return make_family(processor if timestamps else block_processor, timestamps=timestamps)


@pytest.fixture(scope="session")
def row() -> Callable[..., dict[str, Any]]:
    """A row with one question, its images first, and one answer."""

    def make(question: str, answer: str, *, images: tuple[str, ...] = ()) -> dict[str, Any]:
        parts = [{"type": "image", "image": image} for image in images]
        return {
            "messages": [
                {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
                {"role": "assistant", "content": answer},
            ]
        }

    return make
