"""Greedy answers from an exported model, in batches."""

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loongplug.data.conversation import Video, VideoClip
from loongplug.data.media_kinds import KINDS, kind_of
from loongplug.data.media_loader import MediaLoader
from loongplug.data.processor import Processor
from loongplug.data.video import TIMESTAMPS, VideoProcessor, VideoStyle
from loongplug.evaluate.questions import Question
from loongplug.platform import DeviceName

# Each model in transformers takes one of these.
_SECONDS_OF_GRIDS = ("second_per_grid_ts", "video_second_per_grid")
_IF_TAKEN = {*_SECONDS_OF_GRIDS, "mm_token_type_ids"}


def load_model(folder: Path, *, device: DeviceName) -> Any:
    """The model in ``folder`` on ``device``, for inference, from safetensors only.

    On the CPU it computes in float32, which is faster there than what it was saved in.
    """
    from transformers import AutoConfig, AutoModelForMultimodalLM
    from transformers.utils import logging

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"No config.json in {folder}: give a Hugging Face model folder, as --save-hf writes it,"
            " a checkpoint's, as --save does, or one of adapters."
        )
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        config._attn_implementation = "sdpa"  # a folder may name a kernel to fetch
        model, report = AutoModelForMultimodalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32 if device == "cpu" else "auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"The model in {folder} cannot be loaded: {error}") from error
    finally:
        logging.enable_progress_bar()
    if report["missing_keys"]:
        # transformers would answer with random weights in their place.
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ValueError(f"The model in {folder} lacks {missing}: export it again.")
    return model.to(device).eval()


def generate_answers(
    model: Any,
    processor: Processor,
    *,
    questions: Sequence[Question],
    batch_size: int,
    max_new_tokens: int,
    on_done: Callable[[int], None],
    video_style: VideoStyle = TIMESTAMPS,
) -> list[str]:
    """The model's greedy answers, in the order of ``questions``.

    Questions of similar length share a batch. ``on_done`` hears of every batch's size.
    """
    from transformers import GenerationConfig

    end = model.generation_config.eos_token_id
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=processor.end_token_id if end is None else end,
        pad_token_id=processor.pad_token_id,
    )
    videos = VideoProcessor(processor, video_style)
    loader = MediaLoader(processor, videos=videos)
    takes = signature(model.forward).parameters
    order = sorted(range(len(questions)), key=lambda index: len(questions[index].input_ids))
    answers = [""] * len(questions)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        chosen_questions = [questions[index] for index in chosen]
        inputs = _batch(chosen_questions, processor, loader=loader)
        inputs |= _video_times(chosen_questions, processor, video_style)
        inputs = {
            name: tensor.to(model.device)
            for name, tensor in inputs.items()
            if name in takes or name not in _IF_TAKEN
        }
        with torch.inference_mode():
            tokens = model.generate(**inputs, generation_config=config)
        new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
        texts = processor.tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        for index, text in zip(chosen, texts, strict=True):
            answers[index] = text
        on_done(len(chosen))
    return answers


def _batch(
    questions: Sequence[Question], processor: Processor, *, loader: MediaLoader
) -> dict[str, Tensor]:
    """Prompts padded on the left to the longest, with the rows of their media."""
    shape = len(questions), max(len(question.input_ids) for question in questions)
    input_ids = torch.full(shape, processor.pad_token_id)  # [b, s] int64
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for row, question in enumerate(questions):
        length = len(question.input_ids)
        input_ids[row, shape[1] - length :] = torch.from_numpy(question.input_ids)
        attention_mask[row, shape[1] - length :] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    media = [medium for question in questions for medium in question.media]
    where = ", ".join(question.where for question in questions if question.media)
    for kind in KINDS.values():
        if chosen := [medium for medium in media if kind_of(medium) is kind]:
            loaded = loader.load(chosen, where=where)
            inputs |= kind.model_inputs(loaded.rows, loaded.grids, processor)
    # A model that is told of grids may be told which tokens are of images and which of videos.
    if any(name.endswith("_grid_thw") for name in inputs):
        kinds = torch.zeros(shape, dtype=torch.int32)
        for number, name in enumerate(("image", "video"), start=1):
            for token in processor.places(name):
                kinds[input_ids == token] = number
        inputs["mm_token_type_ids"] = kinds
    return inputs


def _video_times(
    questions: Sequence[Question], processor: Processor, style: VideoStyle
) -> dict[str, Tensor]:
    """What a model without timestamps is told of its videos' times, [videos] seconds."""
    media = [medium for question in questions for medium in question.media]
    rates = [medium.fps for medium in media if isinstance(medium, Video | VideoClip)]
    if style.timestamps or not rates:
        return {}
    seconds = torch.tensor([processor.vision.temporal_patch_size / rate for rate in rates])
    return dict.fromkeys(_SECONDS_OF_GRIDS, seconds)
