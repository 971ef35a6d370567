"""Rows to trained tokens, against samples labelled by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loongplug.data.dataset import ChatDataset
from loongplug.data.processor import Processor

pytestmark = pytest.mark.quick


def trained(
    row: dict[str, Any], path: Path, processor: Processor, *, phase: str = "sft"
) -> list[str]:
    """The text of each run of tokens that the loss counts."""
    dataset = ChatDataset(path, processor=processor, seq_length=200, training_phase=phase)
    sample = dataset[0]
    runs: list[list[int]] = []
    for place, (label, counts) in enumerate(zip(sample.labels, sample.loss_mask, strict=True)):
        assert counts in (0, 1)
        if counts:
            if place == 0 or not sample.loss_mask[place - 1]:
                runs.append([])
            runs[-1].append(label)
    return [processor.tokenizer.decode(run) for run in runs]


def test_plain_text_is_trained_whole_with_an_end(
    processor: Processor, write_rows: Callable[..., Path], write_image: Callable[..., str]
) -> None:
    write_image("a.png", height=64, width=64)
    row: dict[str, Any] = {"text": "four five\n six"}
    dataset = ChatDataset(
        write_rows(row), processor=processor, seq_length=200, training_phase="pretrain"
    )
    first = processor.tokenizer.decode(dataset[0].input_ids[:1])
    assert [first + run for run in trained(row, write_rows(row), processor, phase="pretrain")] == [
        "four five\n six<|im_end|>"
    ]
    row = {"text": "A <image>\ndigit<image>", "images": ["a.png", "a.png"]}
    path = write_rows(row)
    assert trained(row, path, processor, phase="pretrain") == [" ", "digit", "<|im_end|>"]
    dataset = ChatDataset(path, processor=processor, seq_length=200, training_phase="pretrain")
    assert processor.tokenizer.decode(dataset[0].input_ids) == (
        "A <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"
        "digit<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"
        "<|im_end|>"
    )
    assert [each.grid for each in dataset[0].extent.media] == [(1, 4, 4)] * 2
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: plain text has no answers to train on"):
        ChatDataset(path, processor=processor, seq_length=200, training_phase="sft")[0]
