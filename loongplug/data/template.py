"""From a conversation to tokens, and which of them are trained on."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from loongplug.data.bounded_template import bounded_template, render_bounded
from loongplug.data.conversation import Conversation, ImagePart, Message, Part
from loongplug.data.processor import Processor, VisionTokens
from loongplug.data.special_text import encode_hidden, encode_text, hide_special

TrainingPhase = Literal["pretrain", "sft"]

_MOST_REASON = 300  # characters of what a template says


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """What stands in the text for an image or a video.

    The chat template writes ``token`` once. ``text`` takes its place, and each ``token`` in
    that text stands for ``run`` tokens.
    """

    token: str
    text: str
    run: int


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sample before padding, [n]."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]  # whether predicting this token counts


_Segment = tuple[str, bool]  # a text, and whether it is trained on


def tokenize_conversation(
    conversation: Conversation,
    processor: Processor,
    *,
    phase: TrainingPhase | None,
    placeholders: Sequence[Placeholder],
) -> Tokens:
    """Apply the chat template and write the images' and videos' placeholders, in their order.

    ``sft`` trains on what the assistant says, its end token included; ``pretrain`` on all text;
    neither on answers that the row leaves out (:attr:`Message.trained`).
    Neither trains on the tokens that mark or stand for images and videos. An assistant's answer
    is tokenized apart from what comes before it, as it is when the model generates it. None gives
    the prompt for the assistant's next answer, of which nothing is trained on.

    Special tokens come from the template and the placeholders alone, unless ``processor`` allows
    them in the row's text.

    Raises ValueError, with the row's place, for a conversation without anything to train on,
    an image or video token in a text that may have some, and a template that this cannot be done
    with.
    """
    where, tokenizer, special = conversation.where, processor.tokenizer, processor.special_texts
    hidden: dict[str, str] = {}  # what marks in the text stand for
    if special is not None:
        messages, hidden = hide_special(conversation.messages, special)
        conversation = dataclasses.replace(conversation, messages=messages)
    segments = _segments(conversation, processor, phase=phase)
    texts = _write_placeholders(
        [text for text, _ in segments], placeholders, tokens=processor.tokens, where=where
    )
    # One by one: a sample's few texts take less time than handing them to the tokenizer's threads,
    # of which a machine full of ranks and workers has none to spare.
    if hidden:
        assert special is not None
        try:
            encoded = [encode_hidden(text, hidden, special, tokenizer) for text in texts]
        except ValueError as error:
            raise ValueError(f"{where}: {error}.") from error
    else:
        encoded = [encode_text(text, tokenizer, special=True) for text in texts]
    ids = np.array([token for part in encoded for token in part], dtype=np.int64)
    trained = np.repeat([trained for _, trained in segments], [len(p) for p in encoded])
    for token in processor.vision_token_ids:
        trained &= ids != token
    if not placeholders:
        return Tokens(ids=ids, trained=trained)
    repeats = np.ones(len(ids), dtype=np.int64)  # how many tokens each of the tokens stands for
    repeats[(ids == processor.image_token_id) | (ids == processor.video_token_id)] = [
        placeholder.run
        for placeholder in placeholders
        for _ in range(placeholder.text.count(placeholder.token))
    ]
    return Tokens(ids=ids.repeat(repeats), trained=trained.repeat(repeats))


def tokenize_prompt(
    conversation: Conversation, processor: Processor, *, placeholders: Sequence[Placeholder]
) -> NDArray[np.int64]:
    """The tokens [n] after which the assistant would speak next, placeholders written."""
    return tokenize_conversation(conversation, processor, phase=None, placeholders=placeholders).ids


def shortest_sample(processor: Processor) -> int:
    """How many tokens the template alone takes for an exchange in which nothing is said."""
    messages = (Message("user", ()), Message("assistant", ()))
    text = _render(messages, processor, where=str(processor.folder))
    return len(processor.tokenizer.encode(text, add_special_tokens=False))


def _segments(
    conversation: Conversation, processor: Processor, *, phase: TrainingPhase | None
) -> list[_Segment]:
    messages, where = conversation.messages, conversation.where
    if phase is None:
        return [(_render(messages, processor, where=where, prompt=True), False)]
    if not conversation.plain:
        left_out = [message.role for message in messages if not message.trained]
        if phase == "pretrain" and {*left_out} - {"assistant"}:
            raise ValueError(
                f"{where}: with --training-phase pretrain, loss and weight can leave out answers"
                " alone: drop them from the other turns."
            )
        if phase == "sft" or left_out:
            others = phase == "pretrain"
            return _assistant_segments(messages, processor, others=others, where=where)
        return [(_render(messages, processor, where=where), True)]
    if phase == "sft":
        raise ValueError(
            f"{where}: plain text has no answers to train on: give messages, or train with"
            " --training-phase pretrain."
        )
    tokens, pieces = processor.tokens, []
    for part in (part for message in messages for part in message.parts):
        if isinstance(part, str):
            pieces.append(part)
        else:
            token = tokens.image if isinstance(part, ImagePart) else tokens.video
            pieces.append(f"{tokens.start}{token}{tokens.end}")
    return [("".join([*pieces, processor.end_token]), True)]


def _assistant_segments(
    messages: Sequence[Message], processor: Processor, *, others: bool, where: str
) -> list[_Segment]:
    """Cut the rendered text before and after each of the assistant's answers.

    ``others``: what is no answer is trained on, too.
    """
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
        segments += [(pending, others), (spoken + end, message.trained)]
        done, pending = whole, rest
    if not segments:
        raise ValueError(
            f"{where}: no assistant message, so nothing to train on: add the answer, or train with"
            " --training-phase pretrain."
        )
    if messages[-1].role != "assistant":
        pending += _continuation(_render(messages, processor, where=where), done, where=where)
    segments.append((pending, others))
    if not any(trained for _, trained in segments):
        raise ValueError(
            f"{where}: no answer is trained on: each has loss false or weight 0. Drop the row."
        )
    return segments


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
    inputs = [_as_template_input(message) for message in messages]
    try:
        return render_chat(inputs, processor.tokenizer, prompt=prompt)
    except TemplateError as error:
        reason = str(error)[:_MOST_REASON].rstrip(".")
        raise ValueError(f"{where}: the chat template refuses this row: {reason}.") from error
    except Exception as error:  # whatever Python raises for what the template does
        reason = f"{type(error).__name__}: {error}"[:_MOST_REASON].rstrip(".")
        raise ValueError(f"{where}: the chat template fails on this row ({reason}).") from error


def _as_template_input(message: Message) -> dict[str, Any]:
    """Text alone goes in as a string, which templates of text models understand as well."""
    if all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": message.text}
    return {"role": message.role, "content": [_part_input(part) for part in message.parts]}


def _part_input(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


def _write_placeholders(
    texts: Sequence[str], placeholders: Sequence[Placeholder], *, tokens: VisionTokens, where: str
) -> list[str]:
    """The texts with each of the chat template's visual tokens replaced by its placeholder."""
    visual = re.compile(f"{re.escape(tokens.image)}|{re.escape(tokens.video)}")
    written = [token for text in texts for token in visual.findall(text)]
    expected = [placeholder.token for placeholder in placeholders]
    for kind, token in (("image", tokens.image), ("video", tokens.video)):
        if written.count(token) != expected.count(token):
            raise ValueError(
                f"{where}: {written.count(token)} {kind} tokens in the text for"
                f" {expected.count(token)} {kind}s. The chat template writes one for each {kind}:"
                f" remove {token} from the text of the messages and list the {kind}s as parts of"
                " the content."
            )
    if written != expected:
        raise ValueError(
            f"{where}: the chat template writes images and videos in another order than the row"
            " lists them: use a template that keeps their order."
        )
    waiting = iter(placeholders)
    return [visual.sub(lambda _: next(waiting).text, text) for text in texts]


def render_chat(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    """The text that ``tokenizer.apply_chat_template`` renders of one conversation.

    ``messages`` are of strings, lists and dictionaries alone. With ``prompt``, the beginning of an
    answer follows.

    What templates may use is what the tokenizer's own environment has, with bounds on what they do
    (:mod:`loongplug.data.bounded_template`). What is left out is its search through tools,
    documents and foreign objects, which takes as long as rendering does. A tokenizer class with an
    ``apply_chat_template`` of its own is asked, without bounds.

    Raises jinja2.TemplateError where the template refuses the conversation or does too much.
    """
    usual = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    # It may have another name in another transformers.
    if not hasattr(chat_template_utils, "_compile_jinja_template") or not usual:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text
    return render_bounded(
        bounded_template(tokenizer.get_chat_template(), _usual_environment()),
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=prompt,
        **tokenizer.special_tokens_map,
    )


@cache
def _usual_environment() -> Environment:
    """What transformers gives to templates; it makes one for each, here for one of no text."""
    environment: Environment = chat_template_utils._compile_jinja_template("").environment
    return environment
