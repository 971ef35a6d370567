"""What looks like a special token in the text of a row is text.

Else ``<|im_end|>`` in a message would end it, and could forge turns, trained ones among them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import count, pairwise

from transformers import PreTrainedTokenizerBase

from loongplug.data.chat_template import After, encode_text
from loongplug.data.conversation import Message, joined_texts
from loongplug.data.processor import SpecialTexts

# A mark is "1" and 16 of these digits: two marks never overlap, and no template changes them,
# neither by the case of letters nor by JSON's escapes.
_DIGITS = str.maketrans("01", "89")
_MARK = re.compile(r"1[2-9]{16}")
_FIRST_MARK = 8**15  # counted from here; texts with numbers of 17 digits that look so are few


def hide_special(
    messages: tuple[Message, ...], special: SpecialTexts
) -> tuple[tuple[Message, ...], dict[str, str]]:
    """The messages with a mark for each special token's writing, and what the marks stand for."""
    taken = set(_MARK.findall(joined_texts(messages)))
    written = ("1" + format(number, "016o").translate(_DIGITS) for number in count(_FIRST_MARK))
    free = (mark for mark in written if mark not in taken)
    marks: dict[str, str] = defaultdict(lambda: next(free))  # of what stands there
    mark = partial(special.pattern.sub, lambda found: marks[found.group()])
    marked = tuple(message.with_texts(mark) for message in messages)
    # A template may put the texts of one message together; between messages, it writes something.
    if any(special.pattern.search(joined_texts([each])) is not None for each in marked):
        raise ValueError(
            "neighbouring texts of a message make a special token together: write them as one text."
        )
    return marked, {mark: text for text, mark in marks.items()}


def encode_hidden(
    text: str,
    hidden: Mapping[str, str],
    special: SpecialTexts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    after: After = "nothing",
) -> list[int]:
    """The ids of a rendered text: special tokens are those that the template wrote, no marks'."""
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
