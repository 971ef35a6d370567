"""Templates that never end or never stop growing are refused, whatever they grow by."""

import time

import pytest
from jinja2 import TemplateError
from pace import times_slower

from loongplug.data import bounded_template as module
from loongplug.data.conversation import Conversation, Message
from loongplug.data.processor import Processor, load_processor
from loongplug.data.template import render_chat, tokenize_conversation

pytestmark = pytest.mark.quick

DOUBLED = "{% set a = ['x', 'y'] %}" + "{% set a = [a, a] %}" * 60
SPACES = "".join(f"{{% set n{i} = namespace(a=1) %}}" for i in range(60))
LINKED = "".join(f"{{% set n{i}.a = [n{i + 1}, n{i + 1}] %}}" for i in range(59))
LONG = "{% set a = 'a' * 100000 %}"
LIST = "{% set a = range(9999)|list %}"

# Which of the two comes first depends on what is left.
GROWS = "does more work than|text or a list"
NUMBER, WIDTH = "a number", "to a width"


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            GROWS,
        ),
        ("{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}", GROWS),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
            "{{ f(50) }}",
            GROWS,
        ),
        (
            "{% set s = namespace(a='aa') %}{% for i in range(60) %}{% set s.a = s.a ~ s.a %}"
            "{% endfor %}",
            GROWS,
        ),
        ("{% set a = 'aa' %}" + "{% set a = a ~ a %}" * 60, GROWS),
        ("{% set a = 'aa' %}" + "{% set a = a + a %}" * 60, GROWS),
        (DOUBLED + "{{ a }}", GROWS),
        (SPACES + LINKED + "{{ n0 }}", GROWS),
        ("{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}", GROWS),
        (LONG + "{% set b %}" + "{{ a }}" * 9999 + "{% endset %}", GROWS),
        (LONG + "{% for i in range(9999) %}{% set b = a[1:] %}{% endfor %}", GROWS),
        (LONG + "{% for i in range(9999) %}{% set b = a|upper %}{% endfor %}", GROWS),
        ("{{ range(99999)|map('string')|map('center', 99999)|join }}", GROWS),
        ("{{ 'a' * 10**10 }}", GROWS),
        ("{{ [0] * 10**10 }}", GROWS),
        ("{{ 'a'.ljust(10**10) }}", GROWS),
        ("{{ 'a'|center(10**10) }}", GROWS),
        ("{{ '{:{w}}'.format(1, w=10**9) }}", WIDTH),
        ("{{ ('{0:99999}' * 20000).format(1) }}", WIDTH),
        ("{{ ('%9999d' * 20000) % (1,) }}", WIDTH),
        ("{{ ('%9999d' * 20000)|format(1) }}", WIDTH),
        (LONG + "{{ range(9999)|list|reverse|join(a) }}", GROWS),
        (LONG + "{{ a.join({}.fromkeys(range(9999)|map('string')).keys()) }}", GROWS),
        (LONG + "{% for i in range(9999) %}{{ loop|join(a) }}{% endfor %}", GROWS),
        (LIST + "{% set b = a[:] %}" + "{% if a == b %}{% endif %}" * 999, GROWS),
        (LIST + "{% if -1 in a %}{% endif %}" * 999, GROWS),
        (
            LIST + "{% set a = a|map('string')|join %}" + "{% if a is lower %}{% endif %}" * 999,
            GROWS,
        ),
        (
            LIST + "{% set d = {(a|join, 1): 1} %}" + "{% if d[(a|join, 1)] %}{% endif %}" * 999,
            GROWS,
        ),
        ("{{ '%*d' % (10**9, 1) }}", WIDTH),
        (LONG + "{{ range(99999)|join(a) }}", GROWS),
        (LONG + "{{ range(99999)|map('string')|join(a) }}", GROWS),
        ("{{ ([[1]] * 9999)|sum(start=[]) }}", "no numbers"),
        (LONG + "{{ a.replace('a', a) }}", GROWS),
        (LONG + "{{ a|replace('a', a) }}", GROWS),
        (LONG + "{{ a.join(a) }}", GROWS),
        ("{{ 10 ** (10 ** 10) }}", NUMBER),
        ("{{ 1|round(1000000, 'ceil') }}", NUMBER),
        ("{{ 1|round(precision=1000000, method='ceil') }}", NUMBER),
        (
            "{% set s = namespace(a=3) %}{% for i in range(60) %}{% set s.a = s.a * s.a %}"
            "{% endfor %}",
            NUMBER,
        ),
        ("{{ '%10000000000d' % 1 }}", WIDTH),
        ("{{ '%10000000000d'|format(1) }}", WIDTH),
        ("{{ '{:>10000000000}'.format(1) }}", WIDTH),
        ("{{ lipsum(n=1) }}", "lipsum"),
        # Quadratic in the length of what they are given.
        ("{{ '<!---->'|striptags }}", "striptags"),
        ("{{ ('<!---->'|safe).striptags() }}", "calls striptags"),
        ("{{ 'a'|wordwrap(1) }}", "wordwrap"),
        ("{{ '((http://a.b))'|urlize }}", "urlize"),
        ("{{ [[[1]]]|pprint }}", "pprint"),
        ("{{ 'a'.encode('punycode') }}", "calls encode"),
        ("{{ (97).to_bytes(1).decode('punycode') }}", "calls decode"),
        ("x" * (module.MOST_SOURCE + 1), "longer than 131,072 characters"),
    ],
)
def test_what_grows_without_end_is_refused(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(module, "MOST_WORK", 2**21)  # as refused, and sooner
    tokenizer = load_processor(processor.folder).tokenizer
    tokenizer.chat_template = template

    def render() -> None:
        with pytest.raises(TemplateError, match=message):
            render_chat([{"role": "user", "content": "Hi"}], tokenizer)

    slower = times_slower(render, lambda: sum(range(100_000)), turns=1, clock=time.thread_time)
    assert slower < 2500  # the slowest: 480


@pytest.mark.not_quick
def test_time_is_bounded_where_work_is_not_seen(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.05)
    tokenizer = load_processor(processor.folder).tokenizer
    tokenizer.chat_template = (
        "{% for i in range(99999) %}{% set a = [" + "1," * 20000 + "] %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match=r"takes more than 0\.05 seconds"):
        render_chat([{"role": "user", "content": "Hi"}], tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 + 'a' }}", r"fails on this row \(TypeError: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"fails on this row \(RecursionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"fails on this row \(Recursion"),
        ("{{ 'a' * 10**10 }}", r"refuses this row: it makes a text or a list that is too large\.$"),
        ("{{ raise_exception('a' * 1000) }}", r"refuses this row: a{300}\.$"),
    ],
)
def test_rows_are_refused_with_their_place(
    processor: Processor, template: str, message: str
) -> None:
    broken = load_processor(processor.folder)
    broken.tokenizer.chat_template = template
    messages = (Message("user", ("Hi",)), Message("assistant", ("1",)))
    with pytest.raises(ValueError, match=f"^rows:1: the chat template {message}"):
        tokenize_conversation(
            Conversation(messages, "rows:1"), broken, phase="sft", placeholders=[]
        )


def test_long_conversations_are_rendered(processor: Processor) -> None:
    chat = [{"role": role, "content": "x" * 9999} for role in ("user", "assistant")] * 500
    assert len(render_chat(chat, processor.tokenizer)) > 9_999_000


def test_to_ask_how_long_a_list_is_costs_nothing(processor: Processor) -> None:
    tokenizer = load_processor(processor.folder).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{% if '</a>' in m.content %}{% endif %}"
        "{{ (messages|length - 1) - loop.index0 }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "x" * 99999}] * 300  # 300 times its length is too much
    assert render_chat(chat, tokenizer).startswith("299298")


def test_numbers_in_what_is_formatted_are_no_widths(processor: Processor) -> None:
    tokenizer = load_processor(processor.folder).tokenizer
    tokenizer.chat_template = "{{ '{} {:3}'.format(messages[0].content, 7) }}{{ '%03d' % 7 }}"
    chat = [{"role": "user", "content": "It costs 1234567890."}]
    assert render_chat(chat, tokenizer) == "It costs 1234567890.   7007"
