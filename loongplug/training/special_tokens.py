"""What a model takes from its tokenizer: the ids of special tokens, and how many ids there are."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """``size`` is one more than the highest id; ``ids`` holds the added tokens by their text."""

    size: int
    ids: Mapping[str, int]


def read_tokenizer(directory: Path) -> TokenizerFacts:
    """Read ``tokenizer.json`` of a Hugging Face tokenizer folder, without loading the tokenizer.

    Raises:
        ValueError: the folder or the file is missing, or is not a tokenizer.
    """
    file = directory / FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        vocabulary = content["model"]["vocab"]
    except OSError as error:
        raise ValueError(f"{directory} has no readable {FILE} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not a tokenizer of Hugging Face's format ({error!r})"
        ) from error
    # Unigram vocabularies are lists, whose positions are the ids.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return TokenizerFacts(size=max([-1, *ids, *added.values()]) + 1, ids=added)


def token_problems(
    model: Any, tokenizer: TokenizerFacts, *, special_tokens: Mapping[str, str]
) -> list[str]:
    """Where the model's token ids are none, or the tokenizer's differ, one sentence each."""
    problems, size = [], model.foundation.vocab_size
    for field, text in special_tokens.items():
        wanted, found = getattr(model, field), tokenizer.ids.get(text)
        if wanted is not None and not 0 <= wanted < size:
            problems.append(f"model.{field} is {wanted}, but the model has ids 0 to {size - 1}")
        elif found is None:
            problems.append(f"the tokenizer has no token {text} for model.{field}")
        elif wanted is not None and wanted != found:
            problems.append(f"model.{field} is {wanted}, but the tokenizer's {text} is {found}")
    return problems


def with_token_ids(
    model: Any, tokenizer: TokenizerFacts, *, special_tokens: Mapping[str, str]
) -> Any:
    """``model`` with the token ids it left to the tokenizer."""
    return dataclasses.replace(
        model, **{field: tokenizer.ids[text] for field, text in special_tokens.items()}
    )
