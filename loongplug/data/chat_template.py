"""A tokenizer's chat template, rendered for tens of thousands of conversations a minute."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils


def render_chat(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    """The text that ``tokenizer.apply_chat_template`` renders of one conversation.

    ``messages`` are of strings, lists and dictionaries alone. With ``prompt``, the beginning of an
    answer follows.

    The environment and the compiled template are the tokenizer's own. What is left out is its
    search through tools, documents and foreign objects, which takes as long as rendering does.
    A tokenizer class with an ``apply_chat_template`` of its own is asked.

    Raises jinja2.TemplateError where the template refuses the conversation.
    """
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    usual = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    # None: a transformers that names it otherwise
    if compile_template is None or not usual:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text
    rendered: str = compile_template(tokenizer.get_chat_template()).render(  # cached
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=prompt,
        **tokenizer.special_tokens_map,
    )
    return rendered
