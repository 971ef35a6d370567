"""What looks like a special token in the text of a row is text.

A chat template writes special tokens between what people said. Whoever writes ``<|im_end|>`` into
a message would otherwise end it, and could forge turns, trained ones among them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from loongplug.data.conversation import Message, map_texts

# A mark is "1" and 16 of these digits: two marks never overlap, and no template changes them,
# neither by the case of letters nor by JSON's escapes.
_DIGITS = str.maketrans("01", "89")
_MARK = re.compile(r"1[2-9]{16}")
After = Literal["nothing", "text", "special"]  # what a piece of a sample's text stands behind
_LINE = "\n"  # which tokenizers keep apart from what follows
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
    """The messages with a mark for each special token's writing, and what the marks stand for."""
    texts: list[str] = []
    map_texts(messages, texts.append)
    # As one: a template may put together what is spread over neighbouring texts.
    whole = "".join(texts)
    spans = [found.span() for found in special.pattern.finditer(whole)]
    if not spans:
        return messages, {}
    taken = set(_MARK.findall(whole))
    written = ("1" + format(number, "016o").translate(_DIGITS) for number in count(_FIRST_MARK))
    free = (mark for mark in written if mark not in taken)
    marks: dict[str, str] = defaultdict(lambda: next(free))  # of what stands there
    starts = iter(accumulate(map(len, texts), initial=0))

    def mark(text: str) -> str:
        start, done = next(starts), 0
        pieces = []
        for first, last in spans:
            begin, end = max(first - start, done), min(last - start, len(text))
            if begin < end:
                pieces += [text[done:begin], marks[text[begin:end]]]
                done = end
        return "".join([*pieces, text[done:]])

    return map_texts(messages, mark), {mark: text for text, mark in marks.items()}


def encode_hidden(
    text: str,
    hidden: Mapping[str, str],
    special: SpecialTexts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    after: After = "nothing",
) -> list[int]:
    """The ids of a rendered text: special tokens are those that the template wrote.

    What marks stand for is encoded as text, together with the text around it; ValueError where the
    tokenizer makes a special token of any. ``after`` is as in :func:`encode_text`.
    """
    ids: list[int] = []
    end = 0
    for found in special.pattern.finditer(text):
        piece = _restored(text[end : found.start()], hidden)
        ids += _as_text(piece, special, tokenizer, after=after)
        ids.append(tokenizer.convert_tokens_to_ids(found.group()))
        end, after = found.end(), "special"
    return ids + _as_text(_restored(text[end:], hidden), special, tokenizer, after=after)


def _restored(text: str, hidden: Mapping[str, str]) -> str:
    return _MARK.sub(lambda mark: hidden.get(mark.group(), mark.group()), text)


def _as_text(
    text: str, special: SpecialTexts, tokenizer: PreTrainedTokenizerBase, *, after: After
) -> list[int]:
    ids = encode_text(text, tokenizer, special=False, after=after)
    if special.ids.isdisjoint(ids):
        return ids
    # The vocabulary of the tokenizer's model has special tokens too: keep their letters apart.
    cuts = [0, *(found.start() + 1 for found in special.pattern.finditer(text)), len(text)]
    ids = []
    for start, end in pairwise(cuts):
        ids += encode_text(text[start:end], tokenizer, special=False, after=after)
        after = "text"
    if not special.ids.isdisjoint(ids):
        raise ValueError(
            "the tokenizer cannot write a special token that stands in the row's text as text: drop"
            " the row, or allow it with --special-tokens-in-text."
        )
    return ids


def encode_text(text: str, tokenizer: Any, *, special: bool, after: After = "nothing") -> list[int]:
    """The ids of a text; with ``special``, special tokens in it are such, else they are text.

    ``after`` is what the text stands behind. Tokenizers of Llama's kind write a space in front of a
    text that begins; one that goes on has none.
    """
    if not text:
        return []
    if after == "nothing" or _begins_alike(tokenizer, after):
        return _encoded(text, tokenizer, special=special)
    line = _encoded(_LINE, tokenizer, special=special)
    ids = _encoded(_LINE + text, tokenizer, special=special)
    if ids[: len(line)] != line:  # a line that the tokenizer joins to this text
        return _encoded(text, tokenizer, special=special)
    return ids[len(line) :]


@lru_cache(maxsize=8)
def added_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that texts are split at, as special tokens are."""
    return frozenset(tokenizer.added_tokens_decoder)


@lru_cache(maxsize=32)
def _begins_alike(tokenizer: Any, after: After) -> bool:
    """Whether a text behind another, or behind a special token, has the ids that it has alone."""
    probe = "a"
    alone = _encoded(probe, tokenizer, special=True)
    line = _encoded(_LINE, tokenizer, special=True)
    behind_line = _encoded(_LINE + probe, tokenizer, special=True)
    if behind_line == [*line, *alone] or behind_line[: len(line)] != line:
        return True
    if after == "text":
        return False
    end = tokenizer.eos_token
    return _encoded(end + probe, tokenizer, special=True)[1:] != behind_line[len(line) :]


def _encoded(text: str, tokenizer: Any, *, special: bool) -> list[int]:
    if not tokenizer.is_fast:
        options = {"add_special_tokens": False, "split_special_tokens": not special}
        ids: list[int] = tokenizer(text, **options)["input_ids"]
        return ids
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # which a tokenizer's file may ask for
    backend.no_truncation()
    backend.encode_special_tokens = not special  # a tokenizer's word for: they are text
    try:
        found: list[int] = backend.encode(text, add_special_tokens=False).ids
        return found
    finally:
        backend.encode_special_tokens = False
