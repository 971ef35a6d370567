"""Chat templates with a bound on what they do.

A template comes from a folder and is a program. Jinja's sandbox keeps it from files and from
Python's inside, but not from loops within loops or from strings that double. Here every loop,
call, filter and operation that makes or compares something is counted against a budget, by the
size of what it takes and makes; so the same row is refused everywhere, however fast the machine is.
What takes longer than its sizes tell, and what no chat template needs, is left out. Processor time
is bounded, too, for what the count does not see. Nothing of this needs signals or threads.
"""

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.runtime import Context, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MOST_WORK = 2**28  # characters and list items taken and made in one rendering
MOST_SECONDS = 30.0  # of processor time of one rendering
MOST_SOURCE = 2**17  # characters of the template itself, which take seconds to compile
_STEP = 256  # what a loop's turn or a call counts beside sizes: a rendering has a million of them
_ITEM = 64  # what a list's item counts beside its own size
_CLOCK_EVERY = 64  # steps
_LARGEST_NUMBER = 2**16  # bits
_LARGEST_PLACES = 100  # of a number that is rounded
# In a format: a width, or one that is among what is formatted.
_WIDTH = re.compile(r"\d+")
_WIDTH_ELSEWHERE = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]+\{")
_BUDGET = "loongplug's budget"  # among a rendering's variables; no name that a template can write
# Tests that go through what they are given.
_THOROUGH = frozenset(("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=",
                       "gt", ">", "greaterthan", "ge", ">=", "upper", "lower"))  # fmt: skip
# Some take the square of a text's length, or more.
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")
_NO_METHODS = ("decode", "encode", "striptags")
_AT_A_GLANCE = ("count", "length")  # filters that look at no item


class TemplateLimitError(TemplateError):
    """A template does more than a chat template has to."""


class _Budget:
    """What is left of one rendering's work and time."""

    def __init__(self) -> None:
        self._left = MOST_WORK
        self._until = time.thread_time() + MOST_SECONDS
        self._steps = 0

    def step(self, *, takes: Iterable[Any] = (), makes: Any = None) -> None:
        """Count a step with the sizes of what it takes and makes."""
        self._left -= _STEP + _size(makes, self._left)
        for value in takes:
            self._left -= _size(value, self._left)
        if self._left < 0:
            raise TemplateLimitError(
                f"it does more work than a rendering may ({MOST_WORK:,} characters taken and made)"
            )
        self._steps += 1
        if self._steps % _CLOCK_EVERY == 0 and time.thread_time() > self._until:
            raise TemplateLimitError(f"it takes more than {MOST_SECONDS:g} seconds")

    def multiply(self, values: Sequence[Any]) -> None:
        """Count a step that takes these; refuse it where two of them multiplied are too large.

        What it makes may be as large. A number counts as the width or the repetition that it may
        be.
        """
        self.step(takes=values)
        factors = sorted(
            abs(value) if isinstance(value, int) else _size(value, self._left) for value in values
        )
        if len(factors) > 1 and factors[-1] * factors[-2] > self._left:
            raise TemplateLimitError("it makes a text or a list that is too large")

    def format(self, text: Any) -> None:
        """Refuse a format whose widths, each of which may be the largest, make too much."""
        if isinstance(text, bytes):
            text = text.decode("latin-1")
        if not isinstance(text, str):
            return
        widths = _WIDTH.findall(text)
        unknown = _WIDTH_ELSEWHERE.search(text) or any(len(width) > 9 for width in widths)
        if unknown or max(map(int, widths), default=0) * len(text) > self._left:
            raise TemplateLimitError("it formats to a width that is too large")


def _size(value: Any, most: int) -> int:
    """Characters and items in all; counts no further than ``most``."""
    if isinstance(value, str):  # nearly all of them are, or nothing
        return len(value)
    if value is None:
        return 0
    total, waiting = 0, [value]
    while waiting and total <= most:
        one = waiting.pop()
        total += _ITEM
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, int):
            total += one.bit_length() // 8
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, range):
            total += _ITEM * len(one)
        elif isinstance(one, dict):
            waiting += one
            waiting += one.values()
        elif isinstance(one, Namespace):
            waiting += one._Namespace__attrs.values()
    return total


def _budget_of(context: Context) -> _Budget:
    budget: _Budget = context.parent[_BUDGET]  # a template's own variables lie elsewhere
    return budget


class _Turns:
    """What a loop goes over, each turn counted."""

    def __init__(self, over: Iterable[Any], budget: _Budget) -> None:
        self._over, self._budget = over, budget

    def __len__(self) -> int:
        return len(self._over)  # type: ignore[arg-type,unused-ignore]

    def __iter__(self) -> Iterator[Any]:
        step = self._budget.step
        for each in self._over:
            step()
            yield each


@pass_context
def _turns(context: Context, over: Iterable[Any]) -> _Turns:
    return _Turns(over, _budget_of(context))


@pass_context
def _made(context: Context, value: Any, more: Any = None) -> Any:
    """The value, counted, and ``more`` beside it."""
    budget = _budget_of(context)
    budget.step(makes=value)
    if more is not None:
        budget.step(makes=more)
    return value


@pass_context
def _joined(context: Context, values: Sequence[Any]) -> str:
    _budget_of(context).step(takes=values)
    return markup_join(values) if context.eval_ctx.autoescape else str_join(values)


class _Counted(NodeTransformer):
    """A template's tree with our filters around what loops and makes."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (jinja's names)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "loongplug_turns")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "loongplug_joined")

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        return self._made(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        return self._made(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        return self._made(node, [pair.value for pair in node.items])

    def _made(self, node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Expr:
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        self.generic_visit(node)
        return _filter(node, "loongplug_made")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter(node, "loongplug_made")
        node.arg = self._taken(node.arg)  # a key may take as long to find as it is large
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        if len(sides) == 2 and not searches and any(isinstance(s, nodes.Const) for s in sides):
            return node  # takes no longer than to write the constant
        node.expr = self._taken(node.expr)
        for operand in node.ops:
            operand.expr = self._taken(operand.expr)
        return node

    def _taken(self, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else _filter(node, "loongplug_made")

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        own = "".join(one.data for one in node.nodes if isinstance(one, nodes.TemplateData))
        if len(own) > _STEP:  # shorter ones are within the steps that they come in
            nothing = nodes.Const("", lineno=node.lineno)
            node.nodes.append(_filter(nothing, "loongplug_made", nodes.Const(own)))
        return node


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of ``like``, in which calls, filters and operators are counted."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "//", "%"))

    def __init__(self, like: Environment) -> None:
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            keep_trailing_newline=like.keep_trailing_newline,
            extensions=[type(extension) for extension in like.extensions.values()],
            finalize=_made,
        )
        self.globals.update(like.globals)
        self.globals.pop("lipsum", None)  # makes as many words as it is asked for
        self.tests.update(like.tests)
        self.filters.update({name: _counted_filter(like, name) for name in like.filters})
        for name in _NO_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(loongplug_turns=_turns, loongplug_made=_made, loongplug_joined=_joined)
        self.tests.update({name: _counted_test(like, name) for name in _THOROUGH & set(like.tests)})

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget, name = _budget_of(context), getattr(called, "__name__", "")
        if isinstance(called, Macro):  # what it does is counted within
            budget.step()
        elif name in _NO_METHODS:
            raise TemplateLimitError(f"it calls {name}, which no chat template needs")
        else:
            args = tuple(_listed(value) for value in args)
            # The sandbox has wrappers of its own around the methods that format.
            owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
            if name in ("format", "format_map"):
                budget.format(owner)
            budget.multiply([*args, *kwargs.values(), owner])
        result = super().call(context, called, *args, **kwargs)
        budget.step(makes=result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > _LARGEST_NUMBER:
                raise TemplateLimitError("it makes a number that is too large")
            budget.step()
        elif operator == "%" and isinstance(left, str | bytes):
            budget.format(left)
            budget.multiply((left, right))
        elif operator == "*":
            budget.multiply((left, right))
        else:
            budget.step(takes=(left, right))
        result = super().call_binop(context, operator, left, right)
        budget.step(makes=result)
        return result


def _counted_filter(like: Environment, name: str) -> Any:
    @pass_context
    def filtered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        if name in _AT_A_GLANCE:
            budget.step()
            return like.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        value = _listed(value)
        if name == "format":
            budget.format(value)
        elif name == "round":
            places = kwargs.get("precision", (*args, 0)[0])
            if not isinstance(places, int) or abs(places) > _LARGEST_PLACES:
                raise TemplateLimitError("it makes a number that is too large")
        elif name == "sum" and not isinstance(kwargs.get("start", (*args, 0, 0)[1]), int | float):
            raise TemplateLimitError("it adds up what are no numbers")
        # As the value of a filter, a number is not a width.
        first = () if isinstance(value, int) else (value,)
        budget.multiply([*first, *args, *kwargs.values()])
        result = like.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        budget.step(makes=result)
        return result

    return filtered


def _counted_test(like: Environment, name: str) -> Any:
    @pass_context
    def tested(context: Context, value: Any, *args: Any) -> Any:
        _budget_of(context).step(takes=(value, *args))
        return like.call_test(name, value, args, None, context, context.eval_ctx)

    return tested


def _listed(value: Any) -> Any:
    """The items of what is gone through only as they are asked for, as a list, which has a size."""
    views = (Iterator, KeysView, ValuesView, ItemsView)
    return list(value) if isinstance(value, views) else value


@lru_cache(maxsize=8)
def bounded_template(source: str, like: Environment) -> Template:
    """The template, compiled with the filters, globals and extensions of ``like``.

    Raises jinja2.TemplateError where it is none, or longer than MOST_SOURCE characters.
    """
    if len(source) > MOST_SOURCE:
        raise TemplateLimitError(f"it is longer than {MOST_SOURCE:,} characters")
    environment = _BoundedEnvironment(like)
    tree = _Counted().visit(environment.parse(source))
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.make_globals(None))


def render_bounded(template: Template, /, **variables: Any) -> str:
    """The text that the template renders; jinja2.TemplateError where it does too much."""
    return template.render(**variables, **{_BUDGET: _Budget()})
