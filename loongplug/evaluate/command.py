"""What ``loongplug eval`` does."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from loongplug.data.processor import Processor, load_processor, require_fit
from loongplug.data.rows import ANY_ROW, RowAccess
from loongplug.data.video import TIMESTAMPS, VideoStyle
from loongplug.evaluate.generation import generate_answers, load_model
from loongplug.evaluate.questions import read_questions
from loongplug.evaluate.report import (
    is_match,
    print_scores,
    print_wrong,
    progress,
    tally,
    tally_by_kind,
)
from loongplug.observe.metrics_file import merge_metrics, read_metrics
from loongplug.platform import choose_device


def evaluate(
    model: Path,
    data: Path,
    *,
    access: RowAccess = ANY_ROW,
    batch_size: int,
    max_new_tokens: int,
    limit: int | None,
    special_tokens_in_text: bool = False,
    device: str,
    json_path: Path | None,
) -> float:
    """Let the model in folder ``model`` answer the questions in ``data``; return the exact match.

    Prints the exact match overall and per kind of question (a row's ``kind`` or ``task``), and a
    few wrong answers. ``json_path`` gets ``exact_match``, ``eval_samples`` and ``eval_seconds``
    (without loading the model); what else it holds stays.

    Raises:
        ValueError: one sentence on what is wrong with the folder, the data or the options.
    """
    for name, value in (
        ("--batch-size", batch_size),
        ("--max-new-tokens", max_new_tokens),
        ("--limit", limit),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1.")
    if json_path is not None:
        read_metrics(json_path)  # better now than after the work
    console = Console()
    hf_model = load_model(model, device=choose_device(device))
    processor = load_processor(model, special_tokens_in_text=special_tokens_in_text)
    _require_fit(processor, hf_model.config)

    started = time.monotonic()
    video_style = _video_style(hf_model.config)
    questions = read_questions(
        data,
        processor,
        access=access,
        limit=limit,
        video_style=video_style,
    )
    with progress(len(questions), console) as on_done:
        answers = generate_answers(
            hf_model,
            processor,
            questions=questions,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            on_done=on_done,
            video_style=video_style,
        )
    seconds = time.monotonic() - started

    matches = [is_match(a, q.answer) for a, q in zip(answers, questions, strict=True)]
    overall = tally(matches)
    print_scores(console, overall, by_kind=tally_by_kind(matches, [q.kind for q in questions]))
    print_wrong(console, questions, answers=answers, matches=matches)
    if json_path is not None:
        metrics = {
            "exact_match": overall.share,
            "eval_samples": overall.total,
            "eval_seconds": round(seconds, 3),
        }
        merge_metrics(json_path, metrics)
    return overall.share


def _require_fit(processor: Processor, config: Any) -> None:
    vision = config.vision_config
    require_fit(
        processor,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        vision_end_token_id=config.vision_end_token_id,
        vocab_size=config.text_config.vocab_size,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        spatial_merge_size=vision.spatial_merge_size,
    )


def _video_style(config: Any) -> VideoStyle:
    """A model that counts time in its positions says how fast; the others read timestamps."""
    tokens_per_second = getattr(config.vision_config, "tokens_per_second", None)
    if tokens_per_second is None:
        return TIMESTAMPS
    return VideoStyle(timestamps=False, tokens_per_second=tokens_per_second)
