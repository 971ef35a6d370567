"""A tokenizer's chat template, rendered for tens of thousands of conversations a minute."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from loongplug.data.bounded_template import bounded_template, render_bounded


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
