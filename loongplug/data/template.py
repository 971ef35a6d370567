"""From a conversation to tokens, and which of them are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from loongplug.data.conversation import Conversation, Message
from loongplug.data.processor import VIDEO_TOKEN, Processor

TrainingPhase = Literal["pretrain", "sft"]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sample before padding, [n]."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]  # whether predicting this token counts


@dataclass(frozen=True)
class _Segment:
    text: str
    trained: bool


def tokenize_conversation(
    conversation: Conversation,
    processor: Processor,
    *,
    phase: TrainingPhase,
    image_token_counts: Sequence[int],
) -> Tokens:
    """Apply the chat template and put each image's number of tokens in its place.

    ``sft`` trains on what the assistant says, its end token included; ``pretrain`` on
    everything but the tokens that mark or stand for images. An assistant's answer is tokenized
    apart from what comes before it, as it is when the model generates it.

    Raises ValueError, with the row's place, for a conversation without anything to train on,
    an image or video token in the text itself, and a template that this cannot be done with.
    """
    segments = (
        _assistant_segments(conversation, processor)
        if phase == "sft"
        else [_Segment(_render(conversation.messages, processor, where=conversation.where), True)]
    )
    texts = [segment.text for segment in segments]
    encoded = processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = np.array([token for part in encoded for token in part], dtype=np.int64)
    lengths = [len(part) for part in encoded]
    trained = np.repeat([segment.trained for segment in segments], lengths)
    ids, trained = _expand_images(
        ids,
        trained,
        processor=processor,
        counts=image_token_counts,
        where=conversation.where,
    )
    if phase == "pretrain":
        trained &= ~np.isin(ids, list(processor.vision_token_ids))
    return Tokens(ids=ids, trained=trained)


def tokenize_prompt(
    conversation: Conversation, processor: Processor, *, image_token_counts: Sequence[int]
) -> NDArray[np.int64]:
    """The tokens [n] after which the assistant would speak next, images expanded."""
    text = _render(conversation.messages, processor, where=conversation.where, prompt=True)
    ids = np.asarray(processor.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    ids, _ = _expand_images(
        ids,
        np.zeros(len(ids), dtype=bool),
        processor=processor,
        counts=image_token_counts,
        where=conversation.where,
    )
    return ids


def shortest_sample(processor: Processor) -> int:
    """How many tokens the template alone takes for an exchange in which nothing is said."""
    messages = (Message("user", ()), Message("assistant", ()))
    text = _render(messages, processor, where=str(processor.folder))
    return len(processor.tokenizer.encode(text, add_special_tokens=False))


def _assistant_segments(conversation: Conversation, processor: Processor) -> list[_Segment]:
    """Cut the rendered text before and after each of the assistant's answers."""
    messages, where = conversation.messages, conversation.where
    segments: list[_Segment] = []
    done = ""
    pending = ""  # text that is not trained on and not yet in a segment
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = _render(messages[:number], processor, where=where, prompt=True)
        whole = _render(messages[: number + 1], processor, where=where)
        pending += _continuation(prompt, done, where=where)
        answer = _continuation(whole, prompt, where=where)
        spoken, end, rest = answer.rpartition(processor.end_token)
        if not end:
            raise ValueError(
                f"{where}: the chat template of {processor.folder} does not end an answer with the"
                f" tokenizer's eos_token {processor.end_token!r}: correct one of the two."
            )
        segments += [_Segment(pending, False), _Segment(spoken + end, True)]
        done, pending = whole, rest
    if not segments:
        raise ValueError(
            f"{where}: no assistant message, so nothing to train on: add the answer, or train with"
            " --training-phase pretrain."
        )
    if messages[-1].role != "assistant":
        pending += _continuation(_render(messages, processor, where=where), done, where=where)
    return [*segments, _Segment(pending, False)]


def _continuation(text: str, beginning: str, *, where: str) -> str:
    if not text.startswith(beginning):
        raise ValueError(
            f"{where}: the chat template renders earlier messages differently once later ones"
            " follow, so the answers cannot be told apart: use a template that only appends."
        )
    return text[len(beginning) :]


def _render(
    messages: Sequence[Message], processor: Processor, *, where: str, prompt: bool = False
) -> str:
    try:
        text = processor.tokenizer.apply_chat_template(
            [_as_template_input(message) for message in messages],
            tokenize=False,
            add_generation_prompt=prompt,
        )
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses this row: {error}.") from error
    assert isinstance(text, str)
    return text


def _as_template_input(message: Message) -> dict[str, Any]:
    """Text alone goes in as a string, which templates of text models understand as well."""
    if all(part.kind == "text" for part in message.parts):
        return {"role": message.role, "content": message.text}
    return {
        "role": message.role,
        "content": [
            {"type": "text", "text": part.value} if part.kind == "text" else {"type": "image"}
            for part in message.parts
        ],
    }


def _expand_images(
    ids: NDArray[np.int64],
    trained: NDArray[np.bool_],
    *,
    processor: Processor,
    counts: Sequence[int],
    where: str,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if (ids == processor.video_token_id).any():
        raise ValueError(
            f"{where}: {VIDEO_TOKEN} in the text, which holds the place of a video: remove it;"
            " videos cannot be loaded yet."
        )
    is_image = ids == processor.image_token_id
    if int(is_image.sum()) != len(counts):
        raise ValueError(
            f"{where}: {int(is_image.sum())} image tokens in the text for {len(counts)} images."
            " The chat template writes one for each image: remove image tokens from the text of"
            " the messages and list the images as parts of the content."
        )
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[is_image] = counts
    return np.repeat(ids, repeats), np.repeat(trained, repeats)
