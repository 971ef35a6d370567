"""What ``loongplug eval`` does."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from loongplug.consoles import table_console, threadless_bars
from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.media_sizes import AudioSizes, PatchSizes
from loongplug.data.object_store import RemoteFile
from loongplug.data.processor import Processor, require_fit
from loongplug.data.processor_folder import load_processor
from loongplug.data.video import TIMESTAMPS, VideoStyle
from loongplug.evaluate.generation import generate_answers, load_model
from loongplug.evaluate.metrics import Metric, metric_named
from loongplug.evaluate.questions import Question, read_questions
from loongplug.evaluate.report import (
    Answered,
    print_scores,
    print_wrong,
    scores_by_task,
    write_predictions,
)
from loongplug.output_files import write_figures
from loongplug.platform import choose_device


def evaluate(
    model: Path,
    data: Path | RemoteFile,
    *,
    access: RowAccess = ANY_ROW,
    batch_size: int,
    max_new_tokens: int,
    limit: int | None,
    device: str,
    metric: str = "exact",
    tolerance: float | None = None,
    trusted_packages: Sequence[str] = (),
    predictions: Path | None = None,
    json_path: Path | None,
    **of_processor: Any,
) -> float:
    """Let the model in folder ``model`` answer the questions in ``data``; return the mean score.

    Prints the score overall and per task (a row's ``task`` or ``kind``), and a few wrong answers.
    ``metric``, ``tolerance`` and ``trusted_packages`` are as in
    :func:`~loongplug.evaluate.metrics.metric_named`. ``predictions`` gets every answer as JSONL.
    ``json_path`` gets the score by the metric's name (``exact_match``), ``scores_per_task``,
    ``eval_samples`` and ``eval_seconds`` (without loading the model); what else it holds stays.
    ``of_processor`` are options of :func:`~loongplug.data.processor_folder.load_processor`.
    """
    scored = metric_named(metric, tolerance=tolerance, trusted_packages=trusted_packages)
    console = table_console()
    hf_model = load_model(model, device=choose_device(device))
    processor = _fitting_processor(model, hf_model.config, **of_processor)
    started = time.monotonic()
    video_style = _video_style(hf_model.config)
    questions = read_questions(data, processor, access=access, limit=limit, video_style=video_style)
    # What cannot be scored is better known before the model's work: right answers try it.
    for question in questions:
        _answered(question, question.answer, scored)
    with threadless_bars(console, estimates=True, transient=False) as bars:
        task = bars.add_task("evaluating", total=len(questions))

        def on_done(count: int) -> None:
            bars.advance(task, count)
            bars.refresh()
            if not console.is_terminal:
                done = round(bars.tasks[task].completed)
                console.print(f"evaluating: {done}/{len(questions)}", highlight=False)

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
    answered = [_answered(*each, scored) for each in zip(questions, answers, strict=True)]
    if predictions is not None:
        write_predictions(predictions, answered)
    scores, by_task = [each.score for each in answered], scores_by_task(answered)
    print_scores(console, scores, by_task=by_task, title=scored.title)
    print_wrong(console, answered)
    metrics = {
        scored.key: fmean(scores),
        "scores_per_task": {name: fmean(each) for name, each in by_task.items()},
        "eval_samples": len(scores),
        "eval_seconds": round(seconds, 3),
    }
    write_figures(json_path, metrics, "metrics", beside=True)
    return fmean(scores)


def _answered(question: Question, answer: str, metric: Metric) -> Answered:
    try:
        return Answered(question, answer, float(metric.score(answer, question.answer)))
    except ValueError as error:
        right = f"the right answer {question.answer!r:.80}"
        raise ValueError(f"{question.where}: {right} cannot be compared: {error}.") from error


def _fitting_processor(folder: Path, config: Any, **options: Any) -> Processor:
    sizes = PatchSizes.of_config(config.to_dict())
    audio_sizes = AudioSizes.of_config(config.to_dict())
    processor = load_processor(folder, patch_sizes=sizes, audio_sizes=audio_sizes, **options)
    vision = getattr(config, "vision_config", None)
    require_fit(
        processor,
        **{name: getattr(config, name, None) for name in processor.tokens},
        vocab_size=config.text_config.vocab_size,
        temporal_patch_size=getattr(vision, "temporal_patch_size", None),
        patch_size=None if sizes is None else sizes.patch_size,
        spatial_merge_size=None if sizes is None else sizes.spatial_merge_size,
    )
    return processor


def _video_style(config: Any) -> VideoStyle:
    """A model that counts time in its positions says how fast; the others read timestamps."""
    rate = getattr(getattr(config, "vision_config", None), "tokens_per_second", None)
    if rate is not None:
        return VideoStyle(timestamps=False, tokens_per_second=rate)
    rate = getattr(config, "position_id_per_seconds", None)
    if rate is not None:
        return VideoStyle(timestamps=False, tokens_per_second=rate, as_sounds=True)
    return TIMESTAMPS
