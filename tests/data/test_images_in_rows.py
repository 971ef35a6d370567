"""Images that stand in their rows: read like files, and let go with their rows."""

import base64
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from surveyed import media_in, survey_of

from loongplug.data.dataset import ChatDataset
from loongplug.data.media_files import InlineFile
from loongplug.data.media_loader import MediaLoader
from loongplug.data.processor import Processor
from loongplug.data.row_files import JsonlIndex

pytestmark = pytest.mark.quick


@pytest.fixture
def rows(
    write_rows: Callable[..., Path],
    write_image: Callable[..., str],
    row: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> Path:
    """The same image in each of two rows."""
    content = (tmp_path / write_image("a.png", height=64, width=32)).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    return write_rows(row("Read", "1", images=(url,)), row("Read it", "1", images=(url,)))


def images_kept() -> int:
    """How many there are in memory, with their bytes."""
    gc.collect()
    return sum(isinstance(each, InlineFile) for each in gc.get_objects())


def test_check_keeps_none(rows: Path, processor: Processor) -> None:
    source = JsonlIndex(rows)
    checker = partial(survey_of, processor)
    before = images_kept()
    for index in range(2):
        assert checker(source, index).findings == ()
    assert images_kept() == before


def test_the_cache_of_pixels_keeps_none_and_knows_the_image_again(
    rows: Path, processor: Processor
) -> None:
    dataset = ChatDataset(
        rows, processor=processor, seq_length=64, training_phase="sft", cache_bytes=0
    )
    loader = MediaLoader(processor, videos=dataset.videos)
    before = images_kept()
    shapes = [tuple(loader.load(media_in(dataset, index), where="").rows.shape) for index in (0, 1)]
    assert shapes == [(8, 1536)] * 2
    assert loader.decoded == 1
    assert images_kept() == before
