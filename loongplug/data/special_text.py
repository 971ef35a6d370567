"""What looks like a special token in the text of a row is text.

A chat template writes special tokens between what people said. Whoever writes ``<|im_end|>`` into
a message would otherwise end it, and could forge turns, trained ones among them.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from loongplug.data.conversation import Message

# A mark is "1" and 16 of these digits: two marks never overlap, and no template changes them,
# neither by the case of letters nor by JSON's escapes.
_DIGITS = str.maketrans("01", "89")
_MARK = re.compile(r"1[2-9]{16}")
_FIRST_MARK = 8**15  # counted from here; texts with numbers of 17 digits that look so are few


@dataclass(frozen=True)
class SpecialTexts:
    """A tokenizer's special tokens by how they are written, and their ids."""

    pattern: re.Pattern[str]
    ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, more: Sequence[str]) -> "SpecialTexts":
        """Those that the tokenizer calls special, and ``more``."""
        added = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        texts = added | set(tokenizer.all_special_tokens) | set(more)
        ids = set(tokenizer.convert_tokens_to_ids(sorted(texts))) - {tokenizer.unk_token_id, None}
        # The longest first: a regular expression takes the first that fits.
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        return cls(re.compile("|".join(map(re.escape, longest_first))), frozenset(ids))


def hide_special(
    messages: tuple[Message, ...], special: SpecialTexts
) -> tuple[tuple[Message, ...], dict[str, str]]:
    """The messages with a mark for each special token's writing, and what the marks stand for.

    They are left as they are where no text has any. A writing that is spread over neighbouring
    texts, which a template may put together, is found too.
    """
    whole = "".join(message.text for message in messages)
    spans = [found.span() for found in special.pattern.finditer(whole)]
    if not spans:
        return messages, {}
    marks = _Marks(whole)
    start, hidden = 0, []
    for message in messages:
        parts = list(message.parts)
        for number, part in enumerate(parts):
            if isinstance(part, str):
                parts[number] = marks.replace(part, [(a - start, b - start) for a, b in spans])
                start += len(part)
        hidden.append(dataclasses.replace(message, parts=tuple(parts)))
    return tuple(hidden), {mark: text for text, mark in marks.by_text.items()}


class _Marks:
    """Gives each piece of text a mark that stands nowhere in ``whole``."""

    def __init__(self, whole: str) -> None:
        self._taken = set(_MARK.findall(whole))
        self._next = _FIRST_MARK
        self.by_text: dict[str, str] = {}

    def replace(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        """The text with a mark for what of each span is in it."""
        pieces, done = [], 0
        for start, end in spans:
            start, end = max(start, done), min(end, len(text))
            if start < end:
                pieces += [text[done:start], self._of(text[start:end])]
                done = end
        return "".join([*pieces, text[done:]])

    def _of(self, text: str) -> str:
        while text not in self.by_text:
            mark = "1" + format(self._next, "016o").translate(_DIGITS)
            self._next += 1
            if mark not in self._taken:
                self.by_text[text] = mark
        return self.by_text[text]


def encode_hidden(
    text: str, hidden: Mapping[str, str], special: SpecialTexts, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The ids of a rendered text: special tokens are those that the template wrote.

    What marks stand for is encoded as text, together with the text around it.

    Raises ValueError where the tokenizer makes a special token of any such text.
    """
    ids: list[int] = []
    end = 0
    for found in special.pattern.finditer(text):
        ids += _as_text(_restored(text[end : found.start()], hidden), special, tokenizer)
        ids.append(tokenizer.convert_tokens_to_ids(found.group()))
        end = found.end()
    return ids + _as_text(_restored(text[end:], hidden), special, tokenizer)


def _restored(text: str, hidden: Mapping[str, str]) -> str:
    return _MARK.sub(lambda mark: hidden.get(mark.group(), mark.group()), text)


def _as_text(text: str, special: SpecialTexts, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = encode_text(text, tokenizer, special=False)
    if special.ids.isdisjoint(ids):
        return ids
    # The vocabulary of the tokenizer's model has special tokens too: keep their letters apart.
    cuts = [0, *(found.start() + 1 for found in special.pattern.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    ids = [token for piece in pieces for token in encode_text(piece, tokenizer, special=False)]
    if not special.ids.isdisjoint(ids):
        raise ValueError(
            "the tokenizer cannot write a special token that stands in the row's text as text: drop"
            " the row, or allow it with --special-tokens-in-text"
        )
    return ids


def encode_text(text: str, tokenizer: Any, *, special: bool) -> list[int]:
    """The ids of a text; with ``special``, special tokens in it are such, else they are text."""
    if not text:
        return []
    if not tokenizer.is_fast:
        options = {"add_special_tokens": False, "split_special_tokens": not special}
        return tokenizer(text, **options)["input_ids"]
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # which a tokenizer's file may ask for
    backend.no_truncation()
    backend.encode_special_tokens = not special  # a tokenizer's word for: they are text
    try:
        return backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = False
