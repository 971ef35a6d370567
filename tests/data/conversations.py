"""Conversations written by hand, and their tokens in one string."""

from collections.abc import Sequence

from loongplug.data.conversation import Conversation, Message, Part
from loongplug.data.processor import Processor
from loongplug.data.tokens import Tokens


def conversation(*messages: tuple[str, str | Sequence[Part]], plain: bool = False) -> Conversation:
    """Of each message its role, and its text or parts."""
    return Conversation(
        messages=tuple(
            Message(role, (content,) if isinstance(content, str) else tuple(content))
            for role, content in messages
        ),
        where="rows.jsonl:3",
        plain=plain,
    )


def marked(tokens: Tokens, processor: Processor) -> str:
    """The tokens in one string, those that are trained on in brackets."""
    names = processor.tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    return " ".join(
        (f"[{name}]" if trained else name).replace("\n", "NL")
        for name, trained in zip(names, tokens.trained, strict=True)
    )
