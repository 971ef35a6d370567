"""What ``loongplug eval`` does."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
from loongplug.output_files import PREDICTIONS, write_figures, write_output
from loongplug.platform import choose_device

WRONG_ANSWERS_SHOWN = 5


@dataclass(frozen=True)
class Answered:
    """A question with the model's answer, and what that is worth, from 0 to 1."""

    question: Question
    answer: str
    score: float


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


def scores_by_task(answered: Sequence[Answered]) -> dict[str, list[float]]:
    """The scores of each task, by its name; questions without a task are left out."""
    found: dict[str, list[float]] = {}
    for each in answered:
        if each.question.task is not None:
            found.setdefault(each.question.task, []).append(each.score)
    return dict(sorted(found.items()))


def print_scores(
    console: Console, scores: Sequence[float], *, by_task: Mapping[str, Sequence[float]], title: str
) -> None:
    table = Table("task", "right", "of", title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, each in (*by_task.items(), ("all", scores)):
        table.add_row(Text(name), f"{sum(each):.6g}", str(len(each)), f"{fmean(each):.1%}")
    console.print(table)


def print_wrong(console: Console, answered: Sequence[Answered]) -> None:
    """A few answers that are not all right, with their places."""
    wrong = [each for each in answered if each.score < 1]
    if not wrong:
        return
    console.print(f"wrong answers ({min(len(wrong), WRONG_ANSWERS_SHOWN)} of {len(wrong)}):")
    for each in wrong[:WRONG_ANSWERS_SHOWN]:
        right = each.question.answer.strip()
        line = f"  {each.question.where}: {each.answer.strip()!r} instead of {right!r}"
        console.print(Text(line), soft_wrap=True)


def write_predictions(path: Path, answered: Sequence[Answered]) -> None:
    rows = (
        {
            "row": each.question.where,
            "task": each.question.task,
            "question": each.question.text,
            "answer": each.question.answer,
            "prediction": each.answer,
            "score": each.score,
        }
        for each in answered
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_output(path, text, PREDICTIONS)
