"""Rendering chats: the text is the tokenizer's own."""

from datetime import datetime
from typing import Any

import pytest
from jinja2 import TemplateError

from loongplug.data.chat_template import render_chat
from loongplug.data.conversation import Conversation, Message
from loongplug.data.processor import Processor
from loongplug.data.processor_folder import load_processor
from loongplug.data.tokens import tokenize_conversation

pytestmark = pytest.mark.quick

IMAGE = {"type": "image"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": " <b>\n"}],
    [
        {"role": "system", "content": "Be {{ brief }}."},
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "Äh?"}, IMAGE]},
        {"role": "assistant", "content": "Ja."},
        {"role": "user", "content": [{"type": "video"}]},
    ],
]
# What a template may reach for beside the messages.
REACHES = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ tools is none }}|{{ documents is none }}"
    "{% if reasoning_content %}no{% endif %}|{{ strftime_now('%Y') }}|{{ messages | tojson }}"
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    "{% generation %}spoken{% endgeneration %}{{ add_generation_prompt }}"
)


@pytest.fixture
def fresh(processor: Processor) -> Processor:
    return load_processor(processor.folder)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", [None, REACHES], ids=["own", "reaching"])
def test_the_text_is_the_tokenizer_s(
    fresh: Processor, *, prompt: bool, template: str | None
) -> None:
    tokenizer = fresh.tokenizer
    if template is not None:
        tokenizer.chat_template = template
    expected = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        for chat in CHATS
    ]
    assert [render_chat(chat, tokenizer, prompt=prompt) for chat in CHATS] == expected
    if template is not None:
        assert str(datetime.now().year) in expected[0]


def test_a_template_that_refuses(fresh: Processor) -> None:
    fresh.tokenizer.chat_template = "{{ raise_exception('no systems') }}"
    with pytest.raises(TemplateError, match="no systems"):
        render_chat(CHATS[0], fresh.tokenizer)


def test_a_class_with_a_way_of_its_own_is_asked(
    fresh: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(_: Any, chat: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return f"{len(chat)} {add_generation_prompt}"

    monkeypatch.setattr(type(fresh.tokenizer), "apply_chat_template", own)
    assert render_chat(CHATS[2], fresh.tokenizer, prompt=True) == "4 True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 + 'a' }}", r"fails on this row \(TypeError: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"fails on this row \(RecursionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"fails on this row \(Recursion"),
        ("{{ messages.__class__.__mro__ }}", r"refuses this row: access to attribute '__class__'"),
        ("{{ raise_exception('a' * 1000) }}", r"refuses this row: a{300}\.$"),
        ("x" * (2**17 + 1), r"refuses this row: it is longer than 131,072 characters\.$"),
    ],
    ids=["type", "nested", "recursive", "unsafe", "raises", "long"],
)
def test_rows_are_refused_with_their_place(fresh: Processor, template: str, message: str) -> None:
    fresh.tokenizer.chat_template = template
    messages = (Message("user", ("Hi",)), Message("assistant", ("1",)))
    with pytest.raises(ValueError, match=f"^rows:1: the chat template {message}"):
        tokenize_conversation(Conversation(messages, "rows:1"), fresh, phase="sft", placeholders=[])
